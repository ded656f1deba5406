import { agentInk, usePage, variantInk } from "./context";
import { DataTable } from "./DataTable";
import type { Run } from "./data";
import { saveSvg } from "./export";
import { compact, duration, fixed, percent, short, signed } from "./numbers";
import { Text } from "./Text";
import { visibleLine } from "./text";

const Z = 1.959963984540054;
const STATES: Record<string, string> = {
  running: "running",
  stopped: "stopped",
  failed: "failed",
  finished: "finished",
};

export function Overview({ run }: { run: Run }) {
  const page = usePage();
  const seconds = (run.seconds.whole ?? []).reduce<number>((total, value) => total + (value ?? 0), 0);
  const totals = Object.values(run.totals);
  const sum = (name: "rollouts" | "tokens" | "updates") => totals.reduce((all, one) => all + one[name], 0);
  const state = STATES[run.status.state ?? ""] ?? "unknown";
  return (
    <div class="stack">
      <section class="intro">
        <p class="lead">
          {run.agents.length} {run.agents.length === 1 ? "agent" : "agents"} trained with{" "}
          <b>{visibleLine(run.method.name)}</b> on <b>{visibleLine(run.task)}</b>
        </p>
        <ul class="agents">
          {run.agents.map((agent) => (
            <li key={agent.name}>
              <i class="swatch" style={{ background: agentInk(page, agent.name) }} />
              <b>
                <Text text={agent.name} />
              </b>{" "}
              <span class="quiet">
                <Text text={agent.model} />
              </span>
            </li>
          ))}
        </ul>
      </section>
      <dl class="tiles">
        <Tile name="Steps" value={`${run.steps.length} of ${run.planned}`} note={state} state={state} />
        <Tile
          name="Rollouts"
          value={short(sum("rollouts"))}
          note={`${short(sum("tokens"))} tokens sampled`}
        />
        <Tile name="Updates" value={short(sum("updates"))} note="of all agents together" />
        <Tile
          name="Time"
          value={seconds ? duration(seconds) : "–"}
          note={run.steps.length ? `${duration(seconds / run.steps.length)} a step` : ""}
        />
      </dl>
      {run.status.message && <p class="banner">{visibleLine(run.status.message)}</p>}
      <div class="grid two">
        <BeforeAfter />
        <Phases run={run} />
      </div>
      {page.summary.study === null &&
        page.summary.tables
          .filter((table) => table.name.endsWith("results"))
          .map((table) => <DataTable key={table.name} table={table} />)}
      <section class="panel">
        <header class="panel-head">
          <h3>Notes</h3>
        </header>
        {run.notes.length ? (
          <ul class="notes">
            {run.notes.map((note, i) => (
              <li key={i}>
                <Text text={note} />
              </li>
            ))}
          </ul>
        ) : (
          <p class="quiet">No notes: nothing went wrong that hacrl watches for.</p>
        )}
      </section>
      <details class="panel">
        <summary>Configuration</summary>
        <pre class="code">
          <Text text={run.config} />
        </pre>
        <p class="note">
          Folder <Text text={run.folder} />, hacrl {page.summary.version}
        </p>
      </details>
    </div>
  );
}

function Tile(props: { name: string; value: string; note: string; state?: string }) {
  return (
    <div class="tile">
      <dt>{props.name}</dt>
      <dd class="value">{props.value}</dd>
      <dd class={`quiet ${props.state ? `state ${props.state}` : ""}`}>{props.note}</dd>
    </div>
  );
}

/** Every agent's accuracy before (grey) and after training, with 95% intervals, for all runs of the page. */
function BeforeAfter() {
  const page = usePage();
  const runs = page.summary.study ? [] : page.summary.runs;
  const rows = runs.flatMap((run) =>
    run.agents.flatMap(({ name }) => {
      const found = run.evaluations.filter((line) => line.agents[name]);
      if (!found.length) return [];
      return [{ run, agent: name, before: found[0]!.agents[name]!, after: found.at(-1)!.agents[name]! }];
    }),
  );
  rows.sort(
    (one, two) =>
      runs[0]!.agents.findIndex((a) => a.name === one.agent) -
      runs[0]!.agents.findIndex((a) => a.name === two.agent),
  );
  if (!rows.length) return null;
  const many = runs.length > 1;
  const left = 150;
  const right = 500;
  const line = 34;
  const x = (value: number) => left + Math.max(0, Math.min(1, value)) * (right - left);
  const height = rows.length * line + 34;
  return (
    <figure class="panel">
      <header class="panel-head">
        <h3>Held-out accuracy, before and after</h3>
        <div class="actions">
          <button
            type="button"
            aria-label="Save the figure Held-out accuracy as SVG"
            onClick={(event) =>
              saveSvg(event.currentTarget.closest("figure")!.querySelector("svg")!, "before-after")
            }
          >
            SVG
          </button>
        </div>
      </header>
      <svg
        viewBox={`0 0 620 ${height}`}
        role="img"
        aria-label={rows
          .map(
            (row) =>
              `${row.agent}, ${row.run.name}: from ${fixed(row.before.mean)} to ${fixed(row.after.mean)}`,
          )
          .join("; ")}
      >
        {[0, 0.25, 0.5, 0.75, 1].map((tick) => (
          <g key={tick}>
            <line class="gridline" x1={x(tick)} x2={x(tick)} y1={4} y2={height - 26} />
            <text class="tick" x={x(tick)} y={height - 8} text-anchor="middle">
              {tick}
            </text>
          </g>
        ))}
        {rows.map((row, i) => {
          const y = i * line + 20;
          const colour = many ? variantInk(page, row.run.variant) : agentInk(page, row.agent);
          const error = Z * row.after.stderr;
          return (
            <g key={`${row.run.name} ${row.agent}`}>
              <text x={left - 12} y={y - (many ? 3 : -4)} text-anchor="end" class="label">
                {clip(row.agent)}
              </text>
              {many && (
                <text x={left - 12} y={y + 11} text-anchor="end" class="tick">
                  {clip(row.run.name)}
                </text>
              )}
              <line
                x1={x(row.before.mean)}
                x2={x(row.after.mean)}
                y1={y}
                y2={y}
                stroke={colour}
                stroke-width="2"
                opacity="0.4"
              />
              <line
                x1={x(row.after.mean - error)}
                x2={x(row.after.mean + error)}
                y1={y}
                y2={y}
                stroke={colour}
                stroke-width="6"
                opacity="0.25"
              />
              <circle cx={x(row.before.mean)} cy={y} r="4.5" class="before" />
              <circle cx={x(row.after.mean)} cy={y} r="5.5" fill={colour} />
              <text x={right + 14} y={y + 4} class="value">
                {fixed(row.after.mean)}
              </text>
              <text x={right + 64} y={y + 4} class="tick">
                {signed(row.after.mean - row.before.mean, 2)}
              </text>
            </g>
          );
        })}
      </svg>
      <p class="note">
        Grey: before training. Band: 95% confidence, normal approximation over the held-out problems.
      </p>
    </figure>
  );
}

function clip(text: string): string {
  const line = visibleLine(text);
  return line.length > 22 ? `${line.slice(0, 21)}…` : line;
}

const PHASES = ["sync", "rollout", "verify", "learn", "evaluate", "save"];

function Phases({ run }: { run: Run }) {
  const page = usePage();
  const totals = new Map<string, Map<string, number>>();
  for (const [name, values] of Object.entries(run.seconds)) {
    const [phase, agent] = name.split(/\/(.*)/s);
    if (!agent) continue;
    const sum = values.reduce<number>((total, value) => total + (value ?? 0), 0);
    totals.set(phase!, (totals.get(phase!) ?? new Map<string, number>()).set(agent, sum));
  }
  const all = [...totals.values()].flatMap((phase) => [...phase.values()]).reduce((a, b) => a + b, 0);
  if (!all) return null;
  const rows = PHASES.filter((phase) => totals.has(phase));
  return (
    <section class="panel">
      <header class="panel-head">
        <h3>Time by phase</h3>
      </header>
      <ul class="bars">
        {rows.map((phase) => {
          const found = totals.get(phase)!;
          const parts = run.agents.flatMap(({ name }): [string, number][] =>
            found.has(name) ? [[name, found.get(name)!]] : [],
          );
          const sum = parts.reduce((total, [, value]) => total + value, 0);
          return (
            <li key={phase}>
              <span class="name">{phase}</span>
              <span class="bar">
                {parts.map(([agent, value]) => (
                  <i
                    key={agent}
                    style={{ width: `${(100 * value) / all}%`, background: agentInk(page, agent) }}
                    title={`${phase} of ${visibleLine(agent)}: ${compact(value)} s`}
                  />
                ))}
              </span>
              <span class="number">
                {percent(sum / all)} <span class="quiet">{duration(sum)}</span>
              </span>
            </li>
          );
        })}
      </ul>
      <p class="note">Colours are agents. Phases of agents that generate at the same time overlap.</p>
    </section>
  );
}
