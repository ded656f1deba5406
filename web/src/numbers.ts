/** Numbers as people read them. */

export function compact(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return minus(String(Number(value.toPrecision(3))));
}

export function fixed(value: number | null | undefined, digits = 3): string {
  return value == null || !Number.isFinite(value) ? "–" : minus(value.toFixed(digits));
}

export function signed(value: number | null | undefined, digits = 3): string {
  if (value == null || !Number.isFinite(value)) return "–";
  return value >= 0 ? `+${value.toFixed(digits)}` : minus(value.toFixed(digits));
}

export function percent(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  const share = 100 * value;
  return `${share !== 0 && Math.abs(share) < 10 ? share.toFixed(1) : Math.round(share)}%`;
}

export function short(value: number): string {
  if (value >= 1e9) return `${(value / 1e9).toPrecision(3)}B`;
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  return value.toLocaleString("en-US");
}

export function duration(seconds: number): string {
  if (seconds < 60) return `${seconds.toPrecision(2)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

/** Return three to six round numbers within a range. */
export function ticks(low: number, high: number): number[] {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= rough)!;
  const found: number[] = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return found;
}

function minus(text: string): string {
  return text.replace(/^-/, "−");
}
