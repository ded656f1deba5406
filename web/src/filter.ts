/** Which prompts and answers of the rollout browser match what the reader asks for. */

import type { Answer, Prompt } from "./data";

export interface Filter {
  step: number | null;
  agent: number | null;
  verdict: string;
  reward: string; // "", or a bin: "=0", "mid", "=1"
  fate: string;
  end: string; // why an episode ended
  only: "" | "one" | "partner" | "split";
  text: string;
}

export const EVERYTHING: Filter = {
  step: null,
  agent: null,
  verdict: "",
  reward: "",
  fate: "",
  end: "",
  only: "",
  text: "",
};

export interface Entry {
  step: number;
  prompt: Prompt;
}

const DROPPED = new Set([
  "too_long",
  "not_representable",
  "non_finite",
  "empty",
  "truncated",
  "environment_failed",
]);

/** Return whether an answer matches all filters that concern single answers. */
export function answerMatches(answer: Answer, filter: Filter): boolean {
  if (filter.agent !== null && answer.a !== filter.agent) return false;
  if (filter.verdict && answer.v !== filter.verdict) return false;
  if (filter.reward && rewardBin(answer.r) !== filter.reward) return false;
  if (filter.fate && !answer.k.some((view) => fateGroup(view.f) === filter.fate)) return false;
  if (filter.end && answer.e?.end !== filter.end) return false;
  return filter.only !== "partner" || taughtPartner(answer);
}

/** Return the entries with at least one answer that matches, in their order. */
export function matching(entries: Entry[], filter: Filter): Entry[] {
  const text = filter.text.trim().toLowerCase();
  return entries.filter(({ step, prompt }) => {
    if (filter.step !== null && step !== filter.step) return false;
    if (filter.only === "one" && solvers(prompt).size !== 1) return false;
    if (filter.only === "split" && !isSplit(prompt)) return false;
    const found = prompt.rollouts.filter((answer) => answerMatches(answer, filter));
    if (!found.length) return false;
    if (!text || includes(prompt.prompt, text) || includes(prompt.id, text)) return true;
    return found.some((answer) => includes(answer.t, text));
  });
}

function includes(text: string, part: string): boolean {
  return text.toLowerCase().includes(part);
}

export function rewardBin(reward: number): string {
  if (reward === 0) return "=0";
  if (reward === 1) return "=1";
  return reward < 0 ? "<0" : reward > 1 ? ">1" : "mid";
}

export function fateGroup(fate: string): string {
  return DROPPED.has(fate) ? "dropped" : fate;
}

/** Return the agents with a correct answer; a reward of at least 1/2 counts where there is no verdict. */
export function solvers(prompt: Prompt): Set<number> {
  return new Set(prompt.rollouts.filter(isSolved).map((answer) => answer.a));
}

export function isSolved(answer: Answer): boolean {
  return answer.v === "scored" ? answer.r >= 0.5 : answer.v === "correct";
}

function isSplit(prompt: Prompt): boolean {
  const solved = prompt.rollouts.filter(isSolved).length;
  return solved > 0 && solved < prompt.rollouts.length;
}

function taughtPartner(answer: Answer): boolean {
  return answer.k.some((view) => view.a !== answer.a && view.f === "used" && (view.w ?? 0) > 0);
}
