import { describe, expect, test } from "vitest";
import type { Answer, Prompt, Run, Table } from "./data";
import { tokenStarts } from "./Episode";
import { asCsv, asLatex, fileName } from "./export";
import { type Entry, EVERYTHING, matching, rewardBin, solvers } from "./filter";
import { type Line, withDashes } from "./lines";
import { compact, duration, percent, short, signed, ticks } from "./numbers";
import { formatRoute, parseRoute } from "./route";
import { ratioBins, spentAt, teaching } from "./teaching";
import { visibleLine, visibleParts } from "./text";
import { tokenStyle } from "./tokens";

describe("text", () => {
  test("what a reader cannot see is an escape", () => {
    expect(visibleLine("a\u202eb\u200bc\x1b[2J\x07\ud83d\u{e0041}")).toBe(
      "a\\u202eb\\u200bc\\x1b[2J\\x07\\ud83d\\U000e0041",
    );
  });
  test("lines, tabs and characters of all scripts stay", () => {
    expect(visibleParts("x = 1\n\ty 数 😀 é")).toEqual([{ text: "x = 1\n\ty 数 😀 é", escaped: false }]);
    expect(visibleParts("a\u2028b")).toEqual([
      { text: "a", escaped: false },
      { text: "\\u2028", escaped: true },
      { text: "b", escaped: false },
    ]);
    expect(visibleParts("")).toEqual([]);
  });
});

test("a turn of an episode begins after the tokens of those before it", () => {
  expect(
    tokenStarts([
      { n: 3, t: "ask" },
      { n: 2, t: "told", o: [["tool", "7"]] },
      { n: 4, t: "say" },
    ]),
  ).toEqual([0, 3, 5]);
});

test("numbers", () => {
  expect([0, 0.5, -1.2345, 1234.5, 2e-7, 3e9, null, Number.NaN].map(compact)).toEqual([
    "0",
    "0.5",
    "−1.23",
    "1,235",
    "2.00e-7",
    "3.00e9",
    "–",
    "–",
  ]);
  expect([percent(0.421), percent(0.0123), percent(0), percent(null)]).toEqual(["42%", "1.2%", "0%", "–"]);
  expect([signed(0.25, 2), signed(-0.25, 2)]).toEqual(["+0.25", "−0.25"]);
  expect([short(999), short(12345), short(2_500_000)]).toEqual(["999", "12.3k", "2.50M"]);
  expect([duration(5), duration(125), duration(7260)]).toEqual(["5.0 s", "2 min 5 s", "2 h 1 min"]);
});

function answer(agent: number, reward: number, text: string, fates: string[] = []): Answer {
  const views = fates.map((fate, a) => ({ a, f: fate, A: 1, s: 1, c: 0, w: fate === "used" ? 0.1 : 0 }));
  const verdict = reward === 1 ? "correct" : "wrong";
  return { a: agent, i: 0, t: text, v: verdict, r: reward, f: "stop", n: 3, p: null, l: [], k: views };
}

function entry(step: number, id: string, ...rollouts: Answer[]): Entry {
  const prompt: Prompt = { id, prompt: `What is ${id}?`, answer: "1", rollouts };
  return { step, prompt };
}

describe("filters", () => {
  const entries = [
    entry(1, "p1", answer(0, 1, "Seven", ["used", "used"]), answer(1, 0, "eight", ["clipped_above", "used"])),
    entry(1, "p2", answer(0, 1, "nine", ["used", "no_signal"]), answer(1, 1, "ten", ["too_long", "used"])),
    entry(2, "p3", answer(0, 0, "seven"), answer(1, 0, "no")),
  ];
  const ids = (change: Partial<typeof EVERYTHING>) =>
    matching(entries, { ...EVERYTHING, ...change }).map(({ prompt }) => prompt.id);

  test("each one alone", () => {
    expect(ids({})).toEqual(["p1", "p2", "p3"]);
    expect(ids({ step: 2 })).toEqual(["p3"]);
    expect(ids({ only: "one" })).toEqual(["p1"]); // p2 was solved by both
    expect(ids({ only: "split" })).toEqual(["p1"]);
    expect(ids({ only: "partner" })).toEqual(["p1"]); // of p2 each agent used its own answer only
    expect(ids({ fate: "dropped" })).toEqual(["p2"]);
    expect(ids({ reward: "=0" })).toEqual(["p1", "p3"]);
    expect(ids({ verdict: "correct" })).toEqual(["p1", "p2"]);
    expect(ids({ text: "SEVEN" })).toEqual(["p1", "p3"]);
    expect(ids({ text: "what is p2" })).toEqual(["p2"]);
  });
  test("by the end of an episode", () => {
    const failed = { ...answer(0, 0, "x"), e: { end: "failed", turns: [] } };
    const mixed = [...entries, entry(3, "p4", failed)];
    const found = matching(mixed, { ...EVERYTHING, end: "failed" });
    expect(found.map(({ prompt }) => prompt.id)).toEqual(["p4"]);
  });
  test("all must hold for the same answer", () => {
    expect(ids({ agent: 1, verdict: "correct" })).toEqual(["p2"]);
    expect(ids({ agent: 1, text: "seven" })).toEqual([]);
  });
  test("rewards without a verdict", () => {
    expect([...solvers(entry(1, "p", { ...answer(1, 0.7, ""), v: "scored" }).prompt)]).toEqual([1]);
    expect([0, 0.3, 1, -1, 2].map(rewardBin)).toEqual(["=0", "mid", "=1", "<0", ">1"]);
  });
});

const run = {
  steps: [1, 2],
  metrics: { ada: { "rollout/rollouts": [8, 16] } },
  pairs: {
    ada: {
      ada: { gradient: [0.75, 0.5], used: [8, 8] },
      bob: {
        used: [8, 4],
        clipped: [0.5, 0.25],
        clipped_above: [0.25, 0],
        ratio_mean: [0.9, 0.6],
        gradient: [0.25, 0.5],
        dropped: [1, null],
      },
    },
  },
  rollouts: [
    { step: 1, ratios: { "ada>bob": [[45, 3]] } },
    {
      step: 2,
      ratios: {
        "ada>bob": [
          [45, 1],
          [100, 2],
        ],
      },
    },
  ],
} as unknown as Run;

test("who taught whom, by hand", () => {
  // 12 uses; clipped 8 * 0.5 + 4 * 0.25 = 5, of which 8 * 0.25 = 2 above; ratio (7.2 + 2.4) / 12
  const found = teaching(run, "ada", "bob", [0, 1])!;
  expect(found).toMatchObject({ uses: 12, clippedBelow: 3, clippedAbove: 2, dropped: 1, gradient: 0.375 });
  expect(found.ratio).toBeCloseTo(0.8);
  expect(teaching(run, "bob", "ada", [0])).toBeNull();
  expect(ratioBins(run, "ada", ["bob"], new Set([1, 2]))[45]).toBe(4);
  expect(ratioBins(run, "ada", ["bob"], new Set([2]))[100]).toBe(2);
  expect([0, 1, 2].map((step) => spentAt(run, "ada", step))).toEqual([0, 8, 24]);
});

test("colours of tokens", () => {
  expect(tokenStyle("source", -6, null)).toEqual({ background: "rgb(204 121 167 / 0.600)" });
  expect(tokenStyle("source", 0, null)).toEqual({});
  expect(tokenStyle("learner", -1, null)).toEqual({});
  expect(tokenStyle("ratio", -1, -0.3).background).toBe("rgb(0 114 178 / 0.500)"); // 0.7 / 1.4, blue: above 1
  expect(tokenStyle("ratio", -0.3, -1).background).toBe("rgb(213 94 0 / 0.500)");
});

test("a place survives its address", () => {
  const route = { view: "rollouts", run: 2, step: 7, prompt: "1+1 & <b>/?#:" };
  expect(parseRoute(formatRoute(route))).toEqual(route);
  expect(parseRoute("#/curves?run=x&step=-1")).toEqual({ view: "curves", run: 0, step: null, prompt: null });
});

test("tables as text", () => {
  const table: Table = {
    name: "a/b",
    title: "T",
    note: "",
    kind: "study",
    run: null,
    columns: ["name", "x"],
    rows: [
      [
        { t: "=1", v: "=1" },
        { t: "0.1235", v: 0.123456 },
      ],
      [
        { t: 'a "b"_c & 5%', v: 'a "b"_c & 5%' },
        { t: "–", v: null },
      ],
    ],
  };
  expect(asCsv(table)).toBe('name,x\n\'=1,0.123456\n"a ""b""_c & 5%",\n');
  expect(asLatex(table)).toContain("\\begin{tabular}{lr}");
  expect(asLatex(table)).toContain('a "b"\\_c \\& 5\\% & -- \\\\');
  const spread: Table = {
    ...table,
    rows: [
      [
        { t: "a", v: "a" },
        { t: "0.51 ± 0.01", v: 0.512, s: 0.0125 },
      ],
      [
        { t: "b", v: "b" },
        { t: "0.25", v: 0.25, s: null },
      ],
    ],
  };
  expect(asCsv(spread)).toBe('name,x,"x, ±"\na,0.512,0.0125\nb,0.25,\n');
  expect(asLatex(spread)).toContain("a & 0.51 $\\pm$ 0.01 \\\\");
  expect([fileName("a/b c"), fileName("../..")]).toEqual(["a-b-c", "figure"]);
});

test("ticks are round numbers within the range", () => {
  expect(ticks(0.42, 1.25)).toEqual([0.5, 0.75, 1, 1.25]);
  expect(ticks(0.9972, 1.0028).map((tick) => tick.toFixed(3))).toEqual(["0.998", "1.000", "1.002"]);
});

test("lines of equal colour have other dashes", () => {
  const line = (colour: string, faint = false): Line => ({ label: "", colour, y: [], faint });
  const drawn = withDashes([line("#111111"), line("#222222"), line("#111111", true), line("#111111")]);
  expect(drawn.map(({ dash }) => dash)).toEqual([undefined, undefined, undefined, [8, 4]]);
});
