import { useState } from "preact/hooks";
import { Chart } from "./Chart";
import { agentInk, type Page, usePage } from "./context";
import { DataTable } from "./DataTable";
import type { Run } from "./data";
import { saveSvg } from "./export";
import { compact, fixed, percent } from "./numbers";
import { Text } from "./Text";
import { last, ratioBins, teaching } from "./teaching";
import { visibleLine } from "./text";

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
          <table class="matrix">
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
      <div class="grid two">
        <NumberMatrix
          title="Capability ratio ω, last step"
          note="P of the learner over P of the source (equation 9). Above 1: the learner is ahead."
          names={names}
          value={(learner, source) => {
            const own = last(run.metrics[learner]?.capability);
            const other = last(run.metrics[source]?.capability);
            return own === null || !other ? null : own / other;
          }}
          centre={1}
        />
        <NumberMatrix
          title={`Mean importance ratio, ${where}`}
          note="Of the source's rollouts under the learner's policy, length-normalised. Below 1: the learner would not have written them."
          names={names}
          value={(learner, source) => teaching(run, learner, source, positions)?.ratio ?? null}
          centre={1}
        />
      </div>
      {page.summary.tables
        .filter((table) => table.name.endsWith("teaching") && table.title.endsWith(run.name))
        .map((table) => (
          <DataTable key={table.name} table={table} />
        ))}
    </div>
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

/** Own ratios upwards, cross ratios downwards, with the ranges in which they carry a gradient. */
function Ratios(props: { run: Run; learner: string; steps: Set<number>; where: string }) {
  const page = usePage();
  const { run, learner, steps } = props;
  const others = run.agents.map(({ name }) => name).filter((name) => name !== learner);
  const own = ratioBins(run, learner, [learner], steps);
  const cross = others.map((name) => ({ name, bins: ratioBins(run, learner, [name], steps) }));
  const total = (bins: number[]) => bins.reduce((a, b) => a + b, 0);
  const crossTotal = cross.reduce((sum, one) => sum + total(one.bins), 0);
  const ownTotal = total(own);
  if (!ownTotal && !crossTotal) return null;
  const stacked = own.map(
    (_, bin) => cross.reduce((sum, one) => sum + one.bins[bin]!, 0) / (crossTotal || 1),
  );
  const ownShare = own.map((count) => count / (ownTotal || 1));
  const topOwn = Math.max(...ownShare, 1e-9);
  const topCross = Math.max(...stacked, 1e-9);
  const width = 520;
  const half = 84;
  const middle = half + 8;
  const [first, end] = inSight(run, ownShare, stacked);
  const bar = width / (end - first);
  const x = (ratio: number) => (ratio / BIN - first) * bar;
  const ticks = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75].filter((tick) => x(tick) >= 0 && x(tick) <= width);
  const band = (range: [number, number] | null, y: number) =>
    range && (
      <rect
        class="clip-band"
        x={Math.max(0, x(range[0]))}
        width={Math.max(1, Math.min(width, x(range[1])) - Math.max(0, x(range[0])))}
        y={y}
        height={half}
      />
    );
  return (
    <figure class="panel">
      <header class="panel-head">
        <h3>Importance ratios of {visibleLine(learner)}</h3>
        <div class="actions">
          <button
            type="button"
            aria-label={`Save the ratios of ${learner} as SVG`}
            onClick={(event) =>
              saveSvg(event.currentTarget.closest("figure")!.querySelector("svg")!, `ratios-${learner}`)
            }
          >
            SVG
          </button>
        </div>
      </header>
      <svg
        viewBox={`0 0 ${width} ${2 * half + 40}`}
        role="img"
        aria-label={`Distribution of importance ratios of ${learner}, ${props.where}: ${ownTotal} own and ${crossTotal} cross rollouts`}
      >
        {band(run.clip.own, middle - half)}
        {band(run.clip.cross, middle)}
        {own.map((_, bin) => {
          if (bin < first || bin >= end) return null;
          let y = middle;
          return (
            <g key={bin}>
              <rect
                x={(bin - first) * bar + 0.5}
                width={bar - 1}
                y={middle - (ownShare[bin]! / topOwn) * (half - 6)}
                height={(ownShare[bin]! / topOwn) * (half - 6)}
                fill={agentInk(page, learner)}
              />
              {cross.map((one) => {
                const height = (one.bins[bin]! / (crossTotal || 1) / topCross) * (half - 6);
                const rect = (
                  <rect
                    key={one.name}
                    x={(bin - first) * bar + 0.5}
                    width={bar - 1}
                    y={y}
                    height={height}
                    fill={agentInk(page, one.name)}
                  />
                );
                y += height;
                return rect;
              })}
            </g>
          );
        })}
        <line class="axis" x1={0} x2={width} y1={middle} y2={middle} />
        <line class="axis dashed" x1={x(1)} x2={x(1)} y1={8} y2={middle + half} />
        <text class="tick" x={4} y={18}>
          own, {compact(ownTotal)}
        </text>
        <text class="tick" x={4} y={middle + half - 4}>
          cross, {compact(crossTotal)}
        </text>
        {ticks.map((tick) => (
          <text
            key={tick}
            class="tick"
            x={Math.min(width - 12, Math.max(8, x(tick)))}
            y={2 * half + 30}
            text-anchor="middle"
          >
            {tick}
          </text>
        ))}
        {end > own.length - 1 && (
          <text class="tick" x={width} y={2 * half + 30} text-anchor="end">
            ≥ 2
          </text>
        )}
      </svg>
      <p class="note">
        Shaded: the range in which a ratio carries a gradient
        {run.clip.own && `, own ${fixed(run.clip.own[0], 2)} to ${fixed(run.clip.own[1], 2)}`}
        {run.clip.cross &&
          `, cross ${fixed(run.clip.cross[0], 2)} to ${fixed(run.clip.cross[1], 2)} in the first update`}
        . Each half has a scale of its own.
      </p>
    </figure>
  );
}

const BIN = 2 / 100; // the width of a bin of ratios; the last bin holds all above 2

/** Return the first bin that is drawn and the one after the last: the clip ranges and all but rare ratios. */
function inSight(run: Run, own: number[], cross: number[]): [number, number] {
  const common = own.map((share, bin) => share > 0.002 || cross[bin]! > 0.002);
  const ranges = [...(run.clip.own ?? []), ...(run.clip.cross ?? [])].map((ratio) => Math.round(ratio / BIN));
  const low = Math.min(...ranges, common.indexOf(true), 0.6 / BIN);
  const high = Math.max(...ranges, common.lastIndexOf(true), 1.2 / BIN);
  return [Math.max(0, low - 2), Math.min(own.length, high + 3)];
}

function NumberMatrix(props: {
  title: string;
  note: string;
  names: string[];
  value: (learner: string, source: string) => number | null;
  centre: number;
}) {
  const page = usePage();
  return (
    <section class="panel">
      <header class="panel-head">
        <h3>{props.title}</h3>
      </header>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a wide table scrolls by keyboard */}
      <section class="scroll" tabIndex={0} aria-label={props.title}>
        <table class="matrix numbers">
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
            {props.names.map((learner) => (
              <tr key={learner}>
                <th scope="row">
                  <AgentName page={page} name={learner} />
                </th>
                {props.names.map((source) => {
                  const value = props.value(learner, source);
                  return (
                    <td key={source} style={{ background: heat(value, props.centre) }}>
                      {fixed(value, 3)}
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </section>
      <p class="note">{props.note}</p>
    </section>
  );
}

/** Blue above the centre, orange below; colour-blind readers can tell them apart. */
function heat(value: number | null, centre: number): string {
  if (value === null || value <= 0) return "transparent";
  const distance = Math.log2(value / centre);
  const strength = Math.min(0.5, Math.abs(distance) * 0.5);
  return distance >= 0 ? `rgb(0 114 178 / ${strength})` : `rgb(213 94 0 / ${strength})`;
}
