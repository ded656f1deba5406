import { useState } from "preact/hooks";
import { Chart } from "./Chart";
import { usePage, variantInk } from "./context";
import { DataTable } from "./DataTable";
import type { StudyCurve } from "./data";
import { type Line, withDashes } from "./lines";
import { visibleLine } from "./text";

const CLEAR_BANDS = 3; // more of them hide each other

export function Study() {
  const page = usePage();
  const [showSeeds, setShowSeeds] = useState(true);
  const study = page.summary.study!;
  const variants = new Set(study.curves.map((curve) => curve.variant)).size;
  const [showBands, setShowBands] = useState(variants <= CLEAR_BANDS);
  const agents = [...new Set(study.curves.map((curve) => curve.agent))];
  return (
    <div class="stack">
      <div class="toolbar">
        <label class="check">
          <input
            type="checkbox"
            checked={showSeeds}
            onChange={(event) => setShowSeeds(event.currentTarget.checked)}
          />{" "}
          show each seed
        </label>
        <label class="check">
          <input
            type="checkbox"
            checked={showBands}
            onChange={(event) => setShowBands(event.currentTarget.checked)}
          />{" "}
          show intervals
        </label>
        <p class="hint">
          Lines: means over seeds. Bands: 95% confidence, Student's t. Reference:{" "}
          {visibleLine(study.reference)}.
        </p>
      </div>
      <div class="grid charts">
        {agents.map((agent) => {
          const curves = study.curves.filter((curve) => curve.agent === agent);
          const x = [...new Set(curves.flatMap((curve) => curve.rollouts))].sort((a, b) => a - b);
          return (
            <Chart
              key={agent}
              title={`${visibleLine(agent)}: held-out accuracy`}
              x={x}
              xLabel="rollouts of the agent"
              height={250}
              points
              lines={withDashes(
                curves.flatMap((curve) =>
                  lines(curve, x, variantInk(page, curve.variant), showSeeds, showBands),
                ),
              )}
            />
          );
        })}
      </div>
      {page.summary.tables
        .filter((table) => table.kind === "study")
        .map((table) => (
          <DataTable key={table.name} table={table} />
        ))}
    </div>
  );
}

function lines(
  curve: StudyCurve,
  x: number[],
  colour: string,
  showSeeds: boolean,
  showBands: boolean,
): Line[] {
  const at = new Map(curve.rollouts.map((rollouts, i) => [rollouts, i]));
  const column = (values: (number | null)[]) => x.map((rollouts) => values[at.get(rollouts) ?? -1] ?? null);
  const seeds = showSeeds
    ? curve.seeds.map(
        (values, i): Line => ({ label: `${curve.variant} ${i}`, colour, y: column(values), faint: true }),
      )
    : [];
  const mean: Line = {
    label: curve.variant,
    colour,
    y: column(curve.mean),
    ...(showBands ? { low: column(curve.low), high: column(curve.high) } : {}),
  };
  return [...seeds, mean];
}
