import { agentInk, usePage } from "./context";
import type { Run } from "./data";
import { saveSvg } from "./export";
import { compact, fixed, ticks } from "./numbers";
import { ratioBins } from "./teaching";
import { visibleLine } from "./text";
import { useWidth } from "./useWidth";

const HEIGHT = 84; // of the bars
const HEAD = 20; // above them
const AXIS = 20; // below them
const ROW = HEAD + HEIGHT + AXIS + 6;
const COMMON = 0.002; // of all ratios: bins with less do not widen the axis

interface Part {
  label: string;
  total: number;
  layers: { name: string; colour: string; counts: number[] }[]; // stacked
  clip: [number, number] | null;
  bins: [number, number]; // where the first one begins, and their width
}

/** How the ratios of own and of other agents' rollouts are distributed, each on an axis of its own. */
export function Ratios(props: { run: Run; learner: string; steps: Set<number>; where: string }) {
  const page = usePage();
  const { run, learner, steps } = props;
  const [box, width] = useWidth(400);
  const part = (label: string, sources: string[], kind: "own" | "cross"): Part => {
    const layers = sources.map((name) => ({
      name,
      colour: agentInk(page, name),
      counts: ratioBins(run, learner, [name], steps),
    }));
    const total = layers.reduce((sum, { counts }) => sum + counts.reduce((a, b) => a + b, 0), 0);
    return { label, total, layers, clip: run.clip[kind], bins: run.bins[kind] };
  };
  const others = run.agents.map(({ name }) => name).filter((name) => name !== learner);
  const parts = [part("own", [learner], "own"), part("cross", others, "cross")].filter(({ total }) => total);
  if (!parts.length) return null;
  const height = parts.length * ROW;
  return (
    <figure class="panel" ref={box}>
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
        viewBox={`0 0 ${width} ${height}`}
        role="img"
        aria-label={`Distribution of importance ratios of ${learner}, ${props.where}: ${parts
          .map((one) => `${compact(one.total)} ${one.label}, ${spoken(one)}`)
          .join("; ")}`}
      >
        {parts.map((one, i) => (
          <Histogram key={one.label} part={one} width={width} top={i * ROW} />
        ))}
      </svg>
      <p class="note">
        Shaded: the range in which a ratio carries a gradient
        {run.clip.own && `, own ${range(run.clip.own)}`}
        {parts.some(({ label }) => label === "cross") &&
          run.clip.cross &&
          `, cross ${range(run.clip.cross)} in the first update`}
        . The last bar on each side holds all that is further out.
      </p>
    </figure>
  );
}

function Histogram({ part, width, top }: { part: Part; width: number; top: number }) {
  const [low, size] = part.bins;
  const counts = part.layers[0]!.counts.map((_, bin) =>
    part.layers.reduce((sum, layer) => sum + layer.counts[bin]!, 0),
  );
  const [first, end] = inSight(part, counts);
  // what is further out is added to the outermost bars
  const folded = (all: number[], bin: number) => {
    if (bin === first) return all.slice(0, first + 1).reduce((a, b) => a + b, 0);
    if (bin === end - 1) return all.slice(end - 1).reduce((a, b) => a + b, 0);
    return all[bin]!;
  };
  const shown = Array.from({ length: end - first }, (_, i) => first + i);
  const highest = Math.max(...shown.map((bin) => folded(counts, bin)), 1);
  const bar = width / (end - first);
  const x = (ratio: number) => ((ratio - low) / size - first) * bar;
  const floor = top + HEAD + HEIGHT;
  const inside = (value: number) => Math.min(width, Math.max(0, value));
  return (
    <g>
      {part.clip && (
        <rect
          class="clip-band"
          x={inside(x(part.clip[0]))}
          width={Math.max(2, inside(x(part.clip[1])) - inside(x(part.clip[0])))}
          y={top + HEAD}
          height={HEIGHT}
        />
      )}
      <line class="axis dashed" x1={x(1)} x2={x(1)} y1={top + HEAD} y2={floor} />
      {shown.map((bin) => {
        let y = floor;
        return part.layers.map((layer) => {
          const tall = (folded(layer.counts, bin) / highest) * (HEIGHT - 6);
          y -= tall;
          return tall > 0 ? (
            <rect
              key={`${layer.name} ${bin}`}
              x={(bin - first) * bar + bar * 0.06}
              width={bar * 0.88}
              y={y}
              height={tall}
              fill={layer.colour}
            />
          ) : null;
        });
      })}
      <line class="axis" x1={0} x2={width} y1={floor} y2={floor} />
      <text class="tick" x={2} y={top + 13}>
        {part.label}, {compact(part.total)} rollouts
      </text>
      {ticks(low + first * size, low + end * size).map((tick) => (
        <text
          key={tick}
          class="tick"
          x={Math.min(width - 14, Math.max(14, x(tick)))}
          y={floor + 14}
          text-anchor="middle"
        >
          {Number(tick.toPrecision(6))}
        </text>
      ))}
    </g>
  );
}

/** Return the first bin that is drawn and the one after the last: the clip range and all but rare ratios. */
function inSight(part: Part, counts: number[]): [number, number] {
  const [low, size] = part.bins;
  const common = counts.map((count) => count > COMMON * part.total);
  const edges = [...(part.clip ?? []), 1].map((ratio) => Math.floor((ratio - low) / size));
  const first = Math.min(...edges, common.indexOf(true)) - 2;
  const last = Math.max(...edges, common.lastIndexOf(true)) + 3;
  return [Math.max(0, first), Math.min(counts.length, last)];
}

function range([low, high]: [number, number]): string {
  const digits = high - low < 0.01 ? 4 : 2;
  return `${fixed(low, digits)} to ${fixed(high, digits)}`;
}

function spoken(part: Part): string {
  if (!part.clip) return "never clipped";
  const [low, size] = part.bins;
  const within = part.layers.reduce(
    (sum, { counts }) =>
      sum +
      counts.reduce((all, count, bin) => {
        const middle = low + (bin + 0.5) * size;
        return all + (middle >= part.clip![0] && middle <= part.clip![1] ? count : 0);
      }, 0),
    0,
  );
  return `about ${Math.round((100 * within) / (part.total || 1))}% within the clip range`;
}
