import { useState } from "preact/hooks";
import { Chart } from "./Chart";
import { agentInk, usePage, variantInk } from "./context";
import type { Run, Series } from "./data";
import { type Line, withDashes } from "./lines";
import { spentAt } from "./teaching";
import { visibleLine } from "./text";

const Z = 1.959963984540054;

interface Metric {
  key: string;
  title: string;
  help?: string;
  range?: [number | null, number | null];
}

/** What people look at first. All further metrics of the run follow, under their names in metrics.jsonl. */
const FIRST: Metric[] = [
  { key: "rollout/reward", title: "Reward", help: "Mean reward of the step's rollouts" },
  { key: "capability", title: "Capability", help: "P of equation 8: the mean over the last steps" },
  { key: "rollout/entropy", title: "Entropy", help: "Nats per token" },
  {
    key: "learning/policy_kl",
    title: "KL of old policy to policy",
    help: "Within the step, nats per token of own responses",
  },
  {
    key: "learning/reference_kl",
    title: "KL of policy to reference",
    help: "Nats per token of own responses",
  },
  { key: "learning/sampler_kl", title: "KL, sampler to learner", help: "Nats per token" },
  { key: "learning/sampler_gap", title: "Gap between sampler and learner", help: "Nats per token" },
  { key: "rollout/response_tokens", title: "Response length", help: "Tokens", range: [0, null] },
  { key: "rollout/stopped", title: "Share of responses that ended", range: [0, 1] },
  { key: "learning/loss", title: "Loss" },
  { key: "learning/grad_norm", title: "Gradient norm", help: "Before clipping", range: [0, null] },
  { key: "learning/learning_rate", title: "Learning rate", range: [0, null] },
  { key: "learning/without_signal", title: "Share of prompts without signal", range: [0, 1] },
  { key: "rollout/all_wrong", title: "Share of prompts without a right response", range: [0, 1] },
  { key: "rollout/all_right", title: "Share of prompts solved by all responses", range: [0, 1] },
];
const NOT_CURVES = new Set(["policy_version", "rollout/rollouts", "learning/updates"]);

export function Curves({ run }: { run: Run }) {
  const page = usePage();
  const many = page.summary.runs.length > 1;
  const [by, setBy] = useState<"agent" | "run">("agent");
  const [agent, setAgent] = useState(run.agents[0]!.name);
  const [smooth, setSmooth] = useState(1);
  const shownAgent = run.agents.some(({ name }) => name === agent) ? agent : run.agents[0]!.name;
  const goTo = (step: number) => page.go({ view: "rollouts", step, prompt: null });

  const linesOf = (key: string): Line[] =>
    by === "agent"
      ? run.agents.map(({ name }) => ({
          label: name,
          colour: agentInk(page, name),
          y: smoothed(run.metrics[name]?.[key] ?? [], smooth),
        }))
      : page.summary.runs.map((one) => ({
          label: one.name,
          colour: variantInk(page, one.variant),
          y: smoothed(one.metrics[shownAgent]?.[key] ?? [], smooth),
        }));
  const keys = new Set(Object.values(run.metrics).flatMap((columns) => Object.keys(columns)));
  const known = FIRST.filter((metric) => keys.has(metric.key));
  const others = [...keys]
    .filter((key) => !NOT_CURVES.has(key) && !FIRST.some((metric) => metric.key === key))
    .sort()
    .map((key): Metric => ({ key, title: key }));
  const x = by === "agent" ? run.steps : longest(page.summary.runs.map((one) => one.steps));
  const draw = (metric: Metric) => {
    const lines = linesOf(metric.key);
    if (!lines.some((line) => line.y.some((value) => value !== null))) return null;
    return (
      <Chart
        key={metric.key}
        title={metric.title}
        help={metric.help}
        x={x}
        xLabel="step"
        steps={x}
        range={metric.range}
        lines={withDashes(lines.map((line) => ({ ...line, y: padded(line.y, x.length) })))}
        onStep={goTo}
      />
    );
  };
  return (
    <div class="stack">
      <div class="toolbar">
        {many && (
          <fieldset class="choice">
            <legend>Lines</legend>
            <label>
              <input type="radio" name="by" checked={by === "agent"} onChange={() => setBy("agent")} /> agents
              of this run
            </label>
            <label>
              <input type="radio" name="by" checked={by === "run"} onChange={() => setBy("run")} /> all runs
            </label>
          </fieldset>
        )}
        {by === "run" && (
          <label>
            Agent{" "}
            <select
              aria-label="Agent"
              value={shownAgent}
              onChange={(event) => setAgent(event.currentTarget.value)}
            >
              {run.agents.map(({ name }) => (
                <option key={name} value={name}>
                  {visibleLine(name)}
                </option>
              ))}
            </select>
          </label>
        )}
        <label>
          Mean over{" "}
          <select
            aria-label="Mean over"
            value={smooth}
            onChange={(event) => setSmooth(Number(event.currentTarget.value))}
          >
            {[1, 3, 5, 10, 25].map((steps) => (
              <option key={steps} value={steps}>
                {steps === 1 ? "1 step" : `${steps} steps`}
              </option>
            ))}
          </select>
        </label>
        <p class="hint">Drag to zoom, double-click to see all. A click goes to the rollouts of that step.</p>
      </div>
      <AccuracyCharts run={run} by={by} agent={shownAgent} />
      <div class="grid charts">{known.map(draw)}</div>
      {others.length > 0 && (
        <details class="more">
          <summary>{others.length} more metrics</summary>
          <div class="grid charts">{others.map(draw)}</div>
        </details>
      )}
    </div>
  );
}

/** Accuracy against rollouts: methods differ in the rollouts that a step costs, so this is the fair axis. */
function AccuracyCharts({ run, by, agent }: { run: Run; by: "agent" | "run"; agent: string }) {
  const page = usePage();
  const pairs =
    by === "agent"
      ? run.agents.map(({ name }) => ({ one: run, name, label: name, colour: agentInk(page, name) }))
      : page.summary.runs.map((one) => ({
          one,
          name: agent,
          label: one.name,
          colour: variantInk(page, one.variant),
        }));
  const curves = pairs.map(({ one, name, label, colour }) => {
    const found = one.evaluations.filter((line) => line.agents[name]);
    return {
      label,
      colour,
      x: found.map((line) => spentAt(one, name, line.step)),
      steps: found.map((line) => line.step),
      y: found.map((line) => line.agents[name]!.mean),
      error: found.map((line) => Z * line.agents[name]!.stderr),
    };
  });
  const x = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  if (x.length < 2) return null;
  const lines = curves.map((curve): Line => {
    const at = new Map(curve.x.map((value, i) => [value, i]));
    const column = (value: (i: number) => number): Series =>
      x.map((spent) => (at.has(spent) ? value(at.get(spent)!) : null));
    return {
      label: curve.label,
      colour: curve.colour,
      y: column((i) => curve.y[i]!),
      low: column((i) => curve.y[i]! - curve.error[i]!),
      high: column((i) => curve.y[i]! + curve.error[i]!),
    };
  });
  return (
    <Chart
      title="Held-out accuracy against rollouts"
      help="Bands: 95% confidence over problems. Rollouts of one agent are the fair axis: methods differ in the rollouts that a step costs."
      x={x}
      xLabel="rollouts of the agent"
      lines={withDashes(lines)}
      steps={x.map((spent) => {
        const curve = curves.find((one) => one.x.includes(spent))!;
        return Math.max(run.steps[0] ?? 1, curve.steps[curve.x.indexOf(spent)]!);
      })}
      onStep={(step) => page.go({ view: "rollouts", step, prompt: null })}
      height={260}
      points
    />
  );
}

function smoothed(values: Series, steps: number): Series {
  if (steps === 1) return values;
  return values.map((value, i) => {
    if (value === null) return null;
    const window = values.slice(Math.max(0, i + 1 - steps), i + 1).filter((one) => one !== null);
    return window.reduce((total, one) => total + one, 0) / window.length;
  });
}

function padded(values: Series, length: number): Series {
  return values.length >= length
    ? values
    : [...values, ...new Array<null>(length - values.length).fill(null)];
}

function longest(all: number[][]): number[] {
  return all.reduce((one, other) => (other.length > one.length ? other : one), []);
}
