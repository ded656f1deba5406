import { agentInk, usePage, variantInk } from "./context";
import { DataTable, TableButtons } from "./DataTable";
import type { Accuracy, Run } from "./data";
import { saveSvg } from "./export";
import { compact, duration, fixed, percent, short, signed } from "./numbers";
import { Text } from "./Text";
import { visibleLine } from "./text";
import { useWidth } from "./useWidth";

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
        <BeforeAfter run={run} />
        <Phases run={run} />
      </div>
      {page.summary.tables
        .filter(({ kind, run: number }) =>
          kind === "results"
            ? page.summary.study === null || number === page.route.run
            : kind === "benchmarks" && number === page.route.run,
        )
        .map((table) => (
          <DataTable key={table.name} table={table} />
        ))}
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

/** Every agent's accuracy before (grey) and after training, with 95% intervals: of all runs, or a study's run. */
function BeforeAfter({ run: chosen }: { run: Run }) {
  const page = usePage();
  const [box, width] = useWidth(560);
  const runs = page.summary.study ? [chosen] : page.summary.runs;
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
  const left = Math.min(150, 0.28 * width);
  const right = width - 104;
  const line = 34;
  const x = (value: number) => left + Math.max(0, Math.min(1, value)) * (right - left);
  const height = rows.length * line + 34;
  return (
    <figure class="panel" ref={box}>
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
        viewBox={`0 0 ${width} ${height}`}
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
          const longest = Math.floor(left / 8);
          return (
            <g key={`${row.run.name} ${row.agent}`}>
              <text x={left - 12} y={y - (many ? 3 : -4)} text-anchor="end" class="label">
                {clip(row.agent, longest)}
              </text>
              {many && (
                <text x={left - 12} y={y + 11} text-anchor="end" class="tick">
                  {clip(row.run.name, longest)}
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
              <Whisker x={x} y={y} accuracy={row.before} colour="#9aa3b0" />
              <Whisker x={x} y={y} accuracy={row.after} colour={colour} />
              <circle cx={x(row.before.mean)} cy={y} r="4.5" class="before" />
              <circle cx={x(row.after.mean)} cy={y} r="5.5" fill={colour} />
              <text x={right + 12} y={y + 4} class="value">
                {fixed(row.after.mean)}
              </text>
              <text x={right + 58} y={y + 4} class="tick">
                {signed(row.after.mean - row.before.mean, 2)}
              </text>
            </g>
          );
        })}
      </svg>
      <p class="note">
        Grey: before training. Whiskers: 95% confidence, normal approximation over the held-out problems.
        {many && " Colours are methods."}
      </p>
    </figure>
  );
}

/** A 95% interval: a line with an end on each side. */
function Whisker(props: { x: (value: number) => number; y: number; accuracy: Accuracy; colour: string }) {
  const { x, y, accuracy } = props;
  const low = x(accuracy.mean - Z * accuracy.stderr);
  const high = x(accuracy.mean + Z * accuracy.stderr);
  return (
    <g stroke={props.colour} stroke-width="2">
      <line x1={low} x2={high} y1={y} y2={y} />
      <line x1={low} x2={low} y1={y - 7} y2={y + 7} />
      <line x1={high} x2={high} y1={y - 7} y2={y + 7} />
    </g>
  );
}

function clip(text: string, longest: number): string {
  const line = visibleLine(text);
  return line.length > longest ? `${line.slice(0, longest - 1)}…` : line;
}

const PHASES = ["sync", "rollout", "verify", "learn", "evaluate", "save"];

function Phases({ run }: { run: Run }) {
  const page = usePage();
  const [box, width] = useWidth(560);
  const totals = new Map<string, Map<string, number>>();
  for (const [name, values] of Object.entries(run.seconds)) {
    const [phase, agent] = name.split(/\/(.*)/s);
    if (!agent) continue;
    const sum = values.reduce<number>((total, value) => total + (value ?? 0), 0);
    totals.set(phase!, (totals.get(phase!) ?? new Map<string, number>()).set(agent, sum));
  }
  const all = [...totals.values()].flatMap((phase) => [...phase.values()]).reduce((a, b) => a + b, 0);
  if (!all) return null;
  const rows = PHASES.filter((phase) => totals.has(phase)).map((phase) => {
    const found = totals.get(phase)!;
    const parts = run.agents.flatMap(({ name }): [string, number][] =>
      found.has(name) ? [[name, found.get(name)!]] : [],
    );
    return { phase, parts, sum: parts.reduce((total, [, value]) => total + value, 0) };
  });
  const table = page.summary.tables.find((one) => one.kind === "time" && one.run === page.route.run);
  const left = 64;
  const full = width - left - 124;
  const line = 30;
  return (
    <figure class="panel" ref={box}>
      <header class="panel-head">
        <h3>Time by phase</h3>
        <div class="actions">
          <button
            type="button"
            aria-label="Save the figure Time by phase as SVG"
            onClick={(event) =>
              saveSvg(event.currentTarget.closest("figure")!.querySelector("svg")!, "time-by-phase")
            }
          >
            SVG
          </button>
          {table && <TableButtons table={table} />}
        </div>
      </header>
      <svg
        viewBox={`0 0 ${width} ${rows.length * line}`}
        role="img"
        aria-label={rows
          .map(({ phase, sum }) => `${phase}: ${percent(sum / all)}, ${duration(sum)}`)
          .join("; ")}
      >
        {rows.map(({ phase, parts, sum }, i) => {
          let x = left;
          const y = i * line + 7;
          return (
            <g key={phase}>
              <text x={0} y={y + 12}>
                {phase}
              </text>
              <rect class="track" x={left} y={y} width={full} height={16} rx={3} />
              {parts.map(([agent, value]) => {
                const part = (
                  <rect
                    key={agent}
                    x={x}
                    y={y}
                    width={(full * value) / all}
                    height={16}
                    fill={agentInk(page, agent)}
                  >
                    <title>
                      {phase} of {visibleLine(agent)}: {compact(value)} s
                    </title>
                  </rect>
                );
                x += (full * value) / all;
                return part;
              })}
              <text x={left + full + 12} y={y + 12} class="value">
                {percent(sum / all)}
              </text>
              <text x={width} y={y + 12} class="tick" text-anchor="end">
                {duration(sum)}
              </text>
            </g>
          );
        })}
      </svg>
      <p class="note">Colours are agents. Phases of agents that generate at the same time overlap.</p>
    </figure>
  );
}
