/** The lines of a chart. */

import type { Series } from "./data";

export interface Line {
  label: string;
  colour: string;
  y: Series;
  low?: Series; // a band around the line
  high?: Series;
  dash?: number[];
  faint?: boolean;
}

/** Lines of equal colour are told apart by their dashes: solid, dashed, dotted. */
export function withDashes(lines: Line[]): Line[] {
  const seen = new Map<string, number>();
  return lines.map((line) => {
    if (line.faint) return line;
    const earlier = seen.get(line.colour) ?? 0;
    seen.set(line.colour, earlier + 1);
    return earlier ? { ...line, dash: DASHES[(earlier - 1) % DASHES.length] } : line;
  });
}

const DASHES = [
  [8, 4],
  [2, 3],
  [8, 3, 2, 3],
];
