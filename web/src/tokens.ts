/** Colours of tokens: stronger for less likely ones; blue and orange for ratios above and below 1. */

export type Colouring = "none" | "source" | "learner" | "ratio";

const MOST = 0.6; // opacity; text stays readable on it in both themes
const LEAST = 6; // nats: less likely tokens are not coloured more strongly

export function tokenStyle(
  colouring: Colouring,
  source: number | null,
  learner: number | null,
): Record<string, string> {
  if (colouring === "ratio") {
    if (source === null || learner === null) return {};
    const log = learner - source;
    const strength = Math.min(MOST, Math.abs(log) / 1.4);
    return strength < 0.02
      ? {}
      : { background: `rgb(${log > 0 ? "0 114 178" : "213 94 0"} / ${strength.toFixed(3)})` };
  }
  const value = colouring === "learner" ? learner : source;
  if (colouring === "none" || value === null) return {};
  const strength = (Math.min(LEAST, -value) / LEAST) ** 0.7 * MOST;
  return strength < 0.02 ? {} : { background: `rgb(204 121 167 / ${strength.toFixed(3)})` };
}
