/** Who taught whom: sums over steps of what each learner made of each source's rollouts. */

import type { Run, Series } from "./data";

export interface Teaching {
  uses: number;
  clippedBelow: number;
  clippedAbove: number;
  dropped: number;
  overLimit: number;
  gradient: number | null; // mean share over the steps
  ratio: number | null; // mean
}

/** Return the sums over the steps at these positions; null if the learner never met the source. */
export function teaching(run: Run, learner: string, source: string, positions: number[]): Teaching | null {
  const pair = run.pairs[learner]?.[source];
  if (!pair) return null;
  const sum = (value: (position: number) => number) => positions.reduce((total, i) => total + value(i), 0);
  const at = (name: string, i: number) => pair[name]?.[i] ?? 0;
  const uses = sum((i) => at("used", i));
  const clipped = sum((i) => at("used", i) * at("clipped", i));
  const above = sum((i) => at("used", i) * at("clipped_above", i));
  const stepsWithUpdates = positions.filter((i) =>
    Object.values(run.pairs[learner] ?? {}).some((other) => other.gradient?.[i] != null),
  );
  return {
    uses,
    clippedBelow: clipped - above,
    clippedAbove: above,
    dropped: sum((i) => at("dropped", i)),
    overLimit: sum((i) => at("left_out", i)),
    gradient: stepsWithUpdates.length ? sum((i) => at("gradient", i)) / stepsWithUpdates.length : null,
    ratio: uses ? sum((i) => at("used", i) * at("ratio_mean", i)) / uses : null,
  };
}

/** Return the number of rollouts by bin of their ratio, over some steps. */
export function ratioBins(run: Run, learner: string, sources: string[], steps: Set<number>): number[] {
  const bins = new Array<number>(101).fill(0);
  for (const step of run.rollouts) {
    if (!steps.has(step.step)) continue;
    for (const source of sources) {
      for (const [bin, count] of step.ratios[`${learner}>${source}`] ?? []) bins[bin]! += count;
    }
  }
  return bins;
}

/** Return a series' last value that is a number. */
export function last(series: Series | undefined): number | null {
  for (let i = (series?.length ?? 0) - 1; i >= 0; i--) if (series![i] != null) return series![i]!;
  return null;
}

/** Return how many rollouts an agent had sampled after a step. */
export function spentAt(run: Run, agent: string, step: number): number {
  const counts = run.metrics[agent]?.["rollout/rollouts"] ?? [];
  return run.steps.reduce((total, at, i) => (at <= step ? total + (counts[i] ?? 0) : total), 0);
}
