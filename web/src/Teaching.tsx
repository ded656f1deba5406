import { useState } from "preact/hooks";
import { Chart } from "./Chart";
import { agentInk, type Page, usePage } from "./context";
import { DataTable, TableButtons } from "./DataTable";
import type { Run, Table } from "./data";
import { compact, fixed, percent } from "./numbers";
import { Ratios } from "./Ratios";
import { Text } from "./Text";
import { last, teaching } from "./teaching";
import { visibleLine } from "./text";

const ALIGNMENT = "learning/gradient_alignment";

export function TeachingView({ run }: { run: Run }) {
  const page = usePage();
  const [window, setWindow] = useState<"all" | number>("all");
  const position = window === "all" ? -1 : Math.max(0, run.steps.indexOf(window));
  const positions = position < 0 ? run.steps.map((_, i) => i) : [position];
  const steps = new Set(positions.map((i) => run.steps[i]!));
  const names = run.agents.map(({ name }) => name);
  const where = window === "all" ? `all ${run.steps.length} steps` : `step ${window}`;
  return (
    <div class="stack">
      <div class="toolbar">
        <label class="check">
          <input
            type="checkbox"
            checked={window === "all"}
            onChange={(event) => setWindow(event.currentTarget.checked ? "all" : (run.steps.at(-1) ?? 1))}
          />{" "}
          all steps
        </label>
        <label class="slider">
          Step{" "}
          <input
            type="range"
            min={run.steps[0] ?? 1}
            max={run.steps.at(-1) ?? 1}
            value={window === "all" ? (run.steps.at(-1) ?? 1) : window}
            onInput={(event) => setWindow(Number(event.currentTarget.value))}
          />{" "}
          <output>{window === "all" ? "all" : window}</output>
        </label>
      </div>
      <section class="panel">
        <header class="panel-head">
          <h3>Who taught whom, {where}</h3>
          <Legend />
        </header>
        {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a wide table scrolls by keyboard */}
        <section class="scroll" tabIndex={0} aria-label="Who taught whom">
          <table class="matrix" style={{ minWidth: `${120 * (names.length + 1)}px` }}>
            <thead>
              <tr>
                <th scope="col">learner ↓ source →</th>
                {names.map((name) => (
                  <th key={name} scope="col">
                    <AgentName page={page} name={name} />
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {names.map((learner) => (
                <tr key={learner}>
                  <th scope="row">
                    <AgentName page={page} name={learner} />
                  </th>
                  {names.map((source) => (
                    <td key={source}>
                      <Cell run={run} learner={learner} source={source} positions={positions} />
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </section>
        <p class="note">
          Large: share of the learner's gradient that came from the source, as the sum of |∂L/∂log π| over all
          tokens. Bar: what became of the source's rollouts.
        </p>
      </section>
      <div class="grid charts">
        {names.map((learner) => {
          const sources = names.filter((source) => run.pairs[learner]?.[source]?.gradient);
          if (sources.length < 2) return null;
          return (
            <Chart
              key={learner}
              title={`What ${visibleLine(learner)} learnt from: share of gradient`}
              x={run.steps}
              xLabel="step"
              steps={run.steps}
              range={[0, 1]}
              lines={sources.map((source) => ({
                label: source,
                colour: agentInk(page, source),
                y: run.pairs[learner]![source]!.gradient!,
              }))}
              onStep={(step) => page.go({ view: "rollouts", step, prompt: null })}
            />
          );
        })}
      </div>
      <div class="grid charts">
        {names.map((learner) => (
          <Ratios key={learner} run={run} learner={learner} steps={steps} where={where} />
        ))}
      </div>
      <Alignment run={run} />
      <div class="grid two">
        <NumberMatrix
          title="Capability ratio ω, last step"
          name="capability-ratios"
          note="P of the learner over P of the source (equation 9). Above 1: the learner is ahead."
          names={names}
          value={(learner, source) => {
            const own = last(run.metrics[learner]?.capability);
            const other = last(run.metrics[source]?.capability);
            return own === null || !other ? null : own / other;
          }}
        />
        <NumberMatrix
          title={`Mean importance ratio, ${where}`}
          name="importance-ratios"
          note="Of the source's rollouts under the learner's policy, length-normalised. Below 1: the learner would not have written them."
          names={names}
          value={(learner, source) => teaching(run, learner, source, positions)?.ratio ?? null}
        />
      </div>
      {page.summary.tables
        .filter((table) => table.kind === "teaching" && table.run === page.route.run)
        .map((table) => (
          <DataTable key={table.name} table={table} />
        ))}
    </div>
  );
}

/** Theorem 4.3 in every step: the angle between what own and what others' rollouts ask for. */
function Alignment({ run }: { run: Run }) {
  const page = usePage();
  const lines = run.agents.flatMap(({ name }) => {
    const y = run.metrics[name]?.[ALIGNMENT];
    return y?.some((value) => value !== null) ? [{ label: name, colour: agentInk(page, name), y }] : [];
  });
  if (!lines.length) return null;
  const all = lines.flatMap(({ y }) => y.filter((value) => value !== null));
  const means = lines.map(({ label, y }) => {
    const found = y.filter((value) => value !== null);
    return `${visibleLine(label)} ${fixed(found.reduce((a, b) => a + b, 0) / found.length, 2)}`;
  });
  return (
    <Chart
      title="Alignment of own and cross gradients"
      note={`Cosine between the gradient of the learner's own rollouts and that of all others', in one update of each step. Above 0: others' rollouts push the learner the same way as its own do (theorem 4.3). One update has few rollouts, so look at the mean over steps: ${means.join(", ")}.`}
      x={run.steps}
      xLabel="step"
      steps={run.steps}
      range={[Math.floor(4 * Math.min(0, ...all)) / 4, 1]}
      lines={lines}
      onStep={(step) => page.go({ view: "rollouts", step, prompt: null })}
    />
  );
}

function AgentName({ page, name }: { page: Page; name: string }) {
  return (
    <span class="agent-name">
      <i class="swatch" style={{ background: agentInk(page, name) }} />
      <Text text={name} />
    </span>
  );
}

const PARTS = [
  ["used", "used"],
  ["below", "clipped below"],
  ["above", "clipped above"],
  ["dropped", "dropped"],
  ["limit", "over limit"],
] as const;

function Legend() {
  return (
    <div class="legend">
      {PARTS.map(([kind, label]) => (
        <span key={kind} class="key">
          <i class={`swatch part-${kind}`} />
          {label}
        </span>
      ))}
    </div>
  );
}

function Cell(props: { run: Run; learner: string; source: string; positions: number[] }) {
  const found = teaching(props.run, props.learner, props.source, props.positions);
  if (!found) return <span class="quiet">–</span>;
  const used = found.uses - found.clippedBelow - found.clippedAbove;
  const all = found.uses + found.dropped + found.overLimit || 1;
  const parts = {
    used,
    below: found.clippedBelow,
    above: found.clippedAbove,
    dropped: found.dropped,
    limit: found.overLimit,
  };
  const text = PARTS.map(([kind, label]) => `${label} ${percent(parts[kind] / all)}`).join(", ");
  return (
    <div class="cell" title={`${text}; ${compact(found.uses)} uses`}>
      <b>{percent(found.gradient)}</b>
      <span class="quiet">{percent(used / all)} used</span>
      <span class="bar" role="img" aria-label={text}>
        {PARTS.map(([kind]) =>
          parts[kind] > 0 ? (
            <i key={kind} class={`part-${kind}`} style={{ width: `${(100 * parts[kind]) / all}%` }} />
          ) : null,
        )}
      </span>
    </div>
  );
}

function NumberMatrix(props: {
  title: string;
  name: string;
  note: string;
  names: string[];
  value: (learner: string, source: string) => number | null;
}) {
  const page = usePage();
  const table: Table = {
    name: props.name,
    title: props.title,
    note: props.note,
    kind: "matrix",
    run: page.route.run,
    columns: ["learner", ...props.names],
    rows: props.names.map((learner) => [
      { t: learner, v: learner },
      ...props.names.map((source) => {
        const value = props.value(learner, source);
        return { t: fixed(value, 3), v: value };
      }),
    ]),
  };
  return (
    <section class="panel">
      <header class="panel-head">
        <h3>{props.title}</h3>
        <TableButtons table={table} />
      </header>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a wide table scrolls by keyboard */}
      <section class="scroll" tabIndex={0} aria-label={props.title}>
        <table class="matrix numbers" style={{ minWidth: `${96 * (props.names.length + 1)}px` }}>
          <thead>
            <tr>
              <th scope="col">learner ↓ source →</th>
              {props.names.map((name) => (
                <th key={name} scope="col">
                  <AgentName page={page} name={name} />
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {table.rows.map(([learner, ...cells]) => (
              <tr key={learner!.t}>
                <th scope="row">
                  <AgentName page={page} name={learner!.t} />
                </th>
                {cells.map(({ t, v }, i) => (
                  <td key={props.names[i]} style={{ background: heat(v as number | null) }}>
                    {t}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </section>
      <p class="note">{props.note}</p>
    </section>
  );
}

/** Blue above 1, orange below; colour-blind readers can tell them apart. */
function heat(value: number | null): string {
  if (value === null || value <= 0) return "transparent";
  const distance = Math.log2(value);
  const strength = Math.min(0.5, Math.abs(distance));
  return distance >= 0 ? `rgb(0 114 178 / ${strength})` : `rgb(213 94 0 / ${strength})`;
}
