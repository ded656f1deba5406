import { useEffect, useId, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { usePage } from "./context";
import type { Series } from "./data";
import { savePng } from "./export";
import type { Line } from "./lines";
import { compact } from "./numbers";
import { visibleLine } from "./text";

interface Props {
  title: string;
  help?: string;
  note?: string;
  x: number[];
  xLabel: string;
  lines: Line[];
  height?: number;
  range?: [number | null, number | null]; // of y; null: from the data
  steps?: number[]; // the step that each point belongs to
  onStep?: (step: number) => void;
  points?: boolean;
}

const sync = uPlot.sync("steps");

/** Lines over steps or rollouts: drag to zoom, double-click to see all, click a point to go to its step. */
export function Chart(props: Props) {
  const page = usePage();
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [at, setAt] = useState<number | null>(null);
  const [zoomed, setZoomed] = useState(false);
  const zoom = useRef<[number, number] | null>(null); // kept when a live update draws the chart again
  const id = useId();
  const { x, lines, height = 200 } = props;

  useEffect(() => {
    const target = box.current!;
    const made = new uPlot(
      options(props, page.isDark, Math.max(120, target.clientWidth), height, setAt, (range) => {
        zoom.current = range;
        setZoomed(range !== null);
      }),
      chartData(props),
      target,
    );
    plot.current = made;
    if (zoom.current) made.setScale("x", { min: zoom.current[0], max: zoom.current[1] });
    const resize = new ResizeObserver(() =>
      made.setSize({ width: Math.max(120, target.clientWidth), height }),
    );
    resize.observe(target);
    return () => {
      resize.disconnect();
      made.destroy();
      plot.current = null;
    };
    // the chart is made anew when what it shows has changed
  }, [JSON.stringify([x, lines, props.range]), page.isDark, height]);

  const onKey = (event: KeyboardEvent) => {
    const chart = plot.current;
    if (!chart) return;
    const last = x.length - 1;
    const here = chart.cursor.idx ?? 0;
    const moves: Record<string, number> = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last };
    if (event.key in moves) {
      const to = Math.min(last, Math.max(0, moves[event.key]!));
      chart.setCursor({ left: chart.valToPos(x[to]!, "x"), top: 10 });
      event.preventDefault();
    } else if (event.key === "Enter" && at !== null && props.steps && props.onStep) {
      props.onStep(props.steps[at]!);
    } else if (event.key === "Escape") {
      showAll(chart, x);
    }
  };
  const values = lines.filter((line) => !line.faint);
  const shown = at ?? x.length - 1;
  return (
    <figure class="panel chart" aria-labelledby={id}>
      <header class="panel-head">
        <h3 id={id} title={props.help}>
          {visibleLine(props.title)}
        </h3>
        <div class="actions">
          {zoomed && (
            <button type="button" onClick={() => plot.current && showAll(plot.current, x)}>
              Show all
            </button>
          )}
          <button
            type="button"
            aria-label={`Save the figure ${props.title} as PNG`}
            onClick={() => plot.current && savePng(plot.current.ctx.canvas, props.title, props.title, values)}
          >
            PNG
          </button>
        </div>
      </header>
      {/* biome-ignore-start lint/a11y/noNoninteractiveTabindex: arrow keys read the chart's values */}
      <div
        ref={box}
        class={props.onStep ? "plot clickable" : "plot"}
        tabIndex={0}
        role="application"
        aria-label={`${props.title}, by ${props.xLabel}. Arrow keys move along the points${props.onStep ? ", Enter goes to the step" : ""}.`}
        onKeyDown={onKey}
      />
      {/* biome-ignore-end lint/a11y/noNoninteractiveTabindex: arrow keys read the chart's values */}
      <figcaption class="legend" aria-live="polite">
        <span class="where">
          {props.xLabel} {x.length ? compact(x[shown]) : "–"}
        </span>
        {values.map((line) => (
          <span key={line.label} class="key">
            <Swatch colour={line.colour} isDashed={line.dash !== undefined} />
            {visibleLine(line.label)} <b>{compact(line.y[shown])}</b>
          </span>
        ))}
      </figcaption>
      {props.note && <p class="note">{props.note}</p>}
    </figure>
  );
}

/** A line's colour, with gaps if the line has gaps. */
function Swatch({ colour, isDashed }: { colour: string; isDashed: boolean }) {
  const background = isDashed
    ? `repeating-linear-gradient(90deg, ${colour} 0 3px, transparent 3px 5px)`
    : colour;
  return <i class="swatch" style={{ background }} />;
}

function showAll(chart: uPlot, x: number[]): void {
  chart.setScale("x", { min: x[0]!, max: x.at(-1)! });
}

function chartData({ x, lines }: Props): uPlot.AlignedData {
  const columns: Series[] = [];
  for (const line of lines) {
    columns.push(line.y);
    if (line.low && line.high) columns.push(line.low, line.high);
  }
  return [x, ...columns] as uPlot.AlignedData;
}

function options(
  props: Props,
  isDark: boolean,
  width: number,
  height: number,
  setAt: (at: number | null) => void,
  setZoom: (range: [number, number] | null) => void,
): uPlot.Options {
  const { x, lines } = props;
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  const few = x.length <= 40;
  let isFirst = true; // the scale that a new chart begins with is nobody's choice
  for (const line of lines) {
    series.push({
      label: line.label,
      stroke: line.faint ? `${line.colour}55` : line.colour,
      width: line.faint ? 1 : 2,
      dash: line.dash,
      spanGaps: true,
      points: { show: !line.faint && (props.points ?? few), size: 5, fill: line.colour, width: 0 },
    });
    if (line.low && line.high) {
      const hidden: uPlot.Series = {
        stroke: "transparent",
        width: 0,
        points: { show: false },
        spanGaps: true,
      };
      series.push(hidden, { ...hidden });
      bands.push({ series: [series.length - 1, series.length - 2], fill: `${line.colour}26` });
    }
  }
  const axis: uPlot.Axis = {
    stroke: isDark ? "#9aa4b2" : "#667085",
    grid: { stroke: "#8080802b", width: 1 }, // seen on dark ground, and on paper
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    gap: 6,
  };
  const [low, high] = props.range ?? [null, null];
  return {
    width,
    height,
    series,
    bands,
    legend: { show: false },
    padding: [8, 12, 0, 0],
    scales: {
      x: { time: false, range: (_, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) },
      y: {
        range: (_, min, max) => {
          if (min == null || max == null) return [low ?? 0, high ?? 1];
          const space = (max - min || Math.abs(max) || 1) * 0.08;
          return [low ?? min - space, high ?? max + space];
        },
      },
    },
    axes: [
      { ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => (tick % 1 ? "" : compact(tick))) },
      { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => compact(tick)) },
    ],
    cursor: {
      y: false,
      sync: props.xLabel === "step" ? { key: sync.key, scales: ["x", null] } : undefined,
      drag: { x: true, y: false, dist: 6 },
      points: { size: 8 },
    },
    hooks: {
      setCursor: [(chart) => setAt(chart.cursor.idx ?? null)],
      setScale: [
        (chart, key) => {
          if (key !== "x") return;
          const min = chart.scales.x!.min ?? x[0]!;
          const max = chart.scales.x!.max ?? x.at(-1)!;
          if (isFirst) isFirst = false;
          else setZoom(min > x[0]! || max < x.at(-1)! ? [min, max] : null);
        },
      ],
      ready: [
        (chart) => {
          let down = 0;
          chart.over.addEventListener("mousedown", (event) => {
            down = event.clientX;
          });
          chart.over.addEventListener("click", (event) => {
            const at = chart.cursor.idx;
            if (Math.abs(event.clientX - down) < 4 && at != null && props.steps && props.onStep) {
              props.onStep(props.steps[at]!);
            }
          });
        },
      ],
    },
  };
}
