import type { ChildProcess } from "node:child_process";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import type { Browser, Page } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { CHROMIUM, launch, MISSING, makePages, open, python, ROOT, startPython } from "./browser";

const AXE = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
let browser: Browser;
let folder: string;
const VIEWS = [
  ["plain", "overview"],
  ["plain", "curves"],
  ["plain", "teaching"],
  ["plain", "rollouts"],
  ["episodes", "rollouts"],
] as const;
const at = (name: string, view = "") => `file://${join(folder, `${name}.html`)}${view && `#/${view}`}`;

if (!CHROMIUM) console.warn(MISSING);
describe.skipIf(!CHROMIUM)(CHROMIUM ? "the page" : `the page (${MISSING})`, () => {
  beforeAll(async () => {
    folder = makePages();
    browser = await launch();
  });
  afterAll(async () => {
    await browser?.close();
  });

  test("charts are drawn, and nothing is asked of any network", async () => {
    for (const view of ["overview", "curves", "teaching", "rollouts"]) {
      const { page, problems, requests } = await open(browser, at("plain", view));
      await page.waitForTimeout(300);
      const canvases = await page.locator("canvas").count();
      if (view === "curves") expect(canvases).toBeGreaterThan(6);
      for (let i = 0; i < canvases; i++) {
        const colours = await page.locator("canvas").nth(i).evaluate(coloursOf);
        expect(colours, `colours in chart ${i} of ${view}`).toBeGreaterThan(5);
      }
      expect(problems).toEqual([]);
      expect(requests).toEqual([]);
      await page.context().close();
    }
  });

  test("an episode is drawn turn by turn, and can be found by its end", async () => {
    const { page, problems } = await open(browser, at("episodes", "rollouts"));
    await page.getByLabel("Ended").selectOption("answered");
    await page.getByLabel("matching answers only").check();
    const answer = page
      .getByRole("region", { name: /Answers of/ })
      .locator("article")
      .first();
    expect(
      await answer.locator(".episode > li").evaluateAll((items) => items.map((one) => one.className)),
    ).toEqual(["observation", "action", "observation", "action", "end"]);
    expect(await answer.locator(".call").allTextContents()).toEqual(["calculate"]);
    expect(await answer.locator(".end").textContent()).toBe("answered without a tool");
    const hint = page.locator(".hint-box");
    await answer.locator(".action .token").first().hover();
    expect(await hint.textContent()).toMatch(/^token 1 "\d.*"\nsource log p −\d/);
    await page.getByLabel("Ended").selectOption("failed");
    expect(await answer.locator(".end").textContent()).toBe(
      "the environment failed: calculate did not answer within 5 s",
    );
    expect(problems).toEqual([]);
    await page.context().close();
  });

  test("from a point of a curve to its step, to a rollout, to a learner's view", async () => {
    const { page, problems } = await open(browser, at("plain", "curves"));
    const reward = page.locator("figure", { has: page.getByRole("heading", { name: "Reward" }) });
    const plot = reward.locator(".u-over");
    const box = (await plot.boundingBox())!;
    await page.mouse.move(box.x + box.width - 2, box.y + 20);
    expect(await reward.locator(".where").textContent()).toBe("step 6");
    await page.mouse.click(box.x + box.width - 2, box.y + 20);
    await expect.poll(() => page.url()).toContain("#/rollouts?step=6");
    await expect.poll(() => page.getByRole("option").filter({ hasText: "step 6" }).count()).toBe(6);
    await page.getByRole("listbox").getByRole("option").nth(2).click();
    await expect.poll(() => page.url()).toContain("prompt=p6-");
    // bob's tokens are pairs of characters, ada's single ones
    const answer = page.getByRole("region", { name: "Answers of bob" }).locator("article").first();
    const pieces = await answer.locator("> .tokens .token").count();
    await page.getByLabel("Learner", { exact: true }).selectOption("ada");
    await page.getByLabel("Colour tokens by").selectOption("learner");
    const retokenised = answer.locator(".retokenised");
    expect(await retokenised.textContent()).toContain("as ada reads it");
    expect(await retokenised.locator(".token").count()).toBeGreaterThan(pieces);
    const hint = page.locator(".hint-box");
    await retokenised.locator(".token").nth(1).hover();
    expect(await hint.textContent()).toMatch(/^token 2 "."\nlearner log p −\d/);
    await answer.locator("header").hover();
    expect(await hint.isVisible()).toBe(false);
    await retokenised.locator(".tokens").focus();
    await page.keyboard.press("ArrowRight");
    await page.keyboard.press("ArrowRight");
    expect(await hint.textContent()).toMatch(/^token 2 /);
    await page.keyboard.press("Escape");
    expect(await hint.isVisible()).toBe(false);
    await page.goBack();
    await expect.poll(() => page.url()).toContain("#/curves");
    expect(problems).toEqual([]);
  });

  test("a drag zooms, and Escape shows all again", async () => {
    const { page } = await open(browser, at("plain", "curves"));
    const reward = page.locator("figure", { has: page.getByRole("heading", { name: "Reward" }) });
    const box = (await reward.locator(".u-over").boundingBox())!;
    await page.mouse.move(box.x + box.width * 0.3, box.y + 40);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width * 0.7, box.y + 40, { steps: 5 });
    await page.mouse.up();
    await expect.poll(() => reward.getByRole("button", { name: "Show all" }).count()).toBe(1);
    await reward.getByRole("application").press("Escape");
    await expect.poll(() => reward.getByRole("button", { name: "Show all" }).count()).toBe(0);
  });

  test("filters", async () => {
    const { page } = await open(browser, at("plain", "rollouts"));
    const found = page.locator(".filters .hint b");
    const counts = async () => (await found.allTextContents()).map(Number);
    await expect.poll(counts).toEqual([144, 36]); // 6 steps x 6 prompts, 2 answers of each of 2 agents
    await page.getByLabel("Agent", { exact: true }).selectOption("bob");
    await expect.poll(counts).toEqual([72, 36]);
    await page.getByLabel("Step", { exact: true }).selectOption("2");
    await expect.poll(counts).toEqual([12, 6]);
    const correct = async (verdict: string) => {
      await page.getByLabel("Verdict").selectOption(verdict);
      await page.waitForTimeout(100);
      return (await counts())[0]!;
    };
    expect((await correct("correct")) + (await correct("wrong"))).toBe(12);
    await page.getByLabel("Verdict").selectOption("");
    await page.getByRole("searchbox").fill("no such text");
    await expect.poll(counts).toEqual([0, 0]);
    expect(await page.getByText("No rollout matches.").count()).toBe(1);
    await page.getByRole("searchbox").fill("WHAT IS 2 + 3");
    await expect.poll(counts).toEqual([2, 1]);
    await page.getByRole("searchbox").fill("");
    await page.getByRole("combobox", { name: "Prompts" }).selectOption("one");
    for (const row of await page.getByRole("listbox").getByRole("option").all()) {
      const scores = await row.locator(".score").allTextContents();
      expect(scores.filter((score) => !score.startsWith("0/"))).toHaveLength(1);
    }
  });

  test("the keyboard reaches everything", async () => {
    const { page } = await open(browser, at("plain", "rollouts"));
    await page.waitForTimeout(300);
    await page.keyboard.press("Tab");
    expect(await focused(page)).toBe("Skip to the content");
    await page.keyboard.press("Enter");
    expect(await page.evaluate(() => document.activeElement?.id)).toBe("main");
    await page.getByRole("listbox").focus();
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("ArrowDown");
    expect(await page.locator('.row[aria-selected="true"]').getAttribute("aria-posinset")).toBe("3");
    await page.keyboard.press("End");
    await expect
      .poll(() => page.locator('.row[aria-selected="true"]').getAttribute("aria-posinset"))
      .toBe("36");
    await page.goto(at("plain", "curves"));
    const chart = page.getByRole("application", { name: /^Reward/ });
    await chart.focus();
    await page.keyboard.press("Home");
    await page.keyboard.press("ArrowRight");
    await page.keyboard.press("Enter");
    await expect.poll(() => page.url()).toContain("#/rollouts?step=2");
  });

  test("tables and figures are saved", async () => {
    const { page } = await open(browser, at("plain", "teaching"));
    const panel = page.locator(".table-panel").first();
    const saved = async (name: string, within = panel) => {
      const [download] = await Promise.all([
        page.waitForEvent("download"),
        within.getByRole("button", { name }).first().click(),
      ]);
      return { name: download.suggestedFilename(), content: readFileSync(await download.path()) };
    };
    const csv = await saved("CSV");
    expect(csv.name).toBe("teaching.csv");
    expect(csv.content.toString()).toMatch(/^learner,source,uses/);
    expect((await saved("LaTeX")).content.toString()).toContain("\\toprule");
    const svg = await saved("Save the ratios of ada as SVG", page.locator("main"));
    expect(svg.content.toString()).toMatch(/^<svg [^>]*xmlns=/);
    // the page's styles are in the file: a band in its colour, text of its size
    expect(svg.content.toString()).toMatch(/class="clip-band"[^>]* fill="rgb\(223, 230, 241\)"/);
    expect(svg.content.toString()).toMatch(/<text [^>]*font-size="11px"/);
    const matrix = page.locator("section.panel", {
      has: page.getByRole("heading", { name: "Capability ratio" }),
    });
    expect((await saved("CSV", matrix)).content.toString()).toMatch(/^learner,ada,bob\nada,1,/);
    await page.goto(at("plain", "overview"));
    const time = page.locator("figure", { has: page.getByRole("heading", { name: "Time by phase" }) });
    expect((await saved("CSV", time)).content.toString()).toMatch(/^phase,agent,seconds/);
    expect((await saved("SVG", time)).name).toBe("time-by-phase.svg");
    await page.goto(at("plain", "teaching"));
    const png = await saved("as PNG", page.locator("main"));
    expect(png.content.subarray(1, 4).toString()).toBe("PNG");
  });

  test("hostile rollouts do nothing and hide nothing", async () => {
    const { page, problems, requests } = await open(browser, at("hostile", "rollouts"));
    await expect.poll(() => page.locator("article").count()).toBeGreaterThan(4);
    const seen = new Set<string>();
    const rows = await page.getByRole("listbox").getByRole("option").count();
    for (let i = 0; i < rows; i++) {
      await page.getByRole("listbox").getByRole("option").nth(i).click();
      for (const text of await page.locator("article .text").allTextContents()) seen.add(text);
    }
    const all = [...seen].join("\n");
    expect(all).toContain("<script>window.hacked = 1</script>");
    expect(all).toContain("abc\\u202egnp.exe\\u202c");
    expect(all).toContain("\\x1b[2J\\x1b]0;title\\x07 bell");
    expect(all).toContain("half of a pair \\ud83d and \\u2028 lines");
    expect(all).not.toMatch(/[\u202e\u200b\x1b\u2028]/);
    expect(await page.evaluate(() => "hacked" in window)).toBe(false);
    await page.goto(at("hostile", "overview"));
    expect(await page.locator(".notes").textContent()).toContain("<b>markup</b>");
    expect(problems).toEqual([]);
    expect(requests).toEqual([]);
  });

  test("a study shows curves and tests", async () => {
    const { page, problems } = await open(browser, at("study"));
    expect(await page.locator("canvas").count()).toBe(4);
    const table = (title: string) =>
      page.locator(".table-panel", { has: page.getByRole("heading", { name: title, exact: true }) });
    const differences = table("Difference from gspo, paired by seed");
    expect(await differences.getByText("corrected by Holm's method").count()).toBe(1);
    expect(await differences.getByRole("row", { name: /^hacpo ada 0.020/ }).count()).toBe(1);
    // seeds are 0.5, 0.51 and 0.52
    expect(await table("Held-out accuracy by method").getByText("0.510 ± 0.010").count()).toBe(1);
    const cells = (name: string) => table(name).locator("tbody tr > :nth-child(2)").allTextContents();
    expect(await cells("hacpo by alpha")).toEqual(["0", "1", "2"]);
    expect(await cells("Ablations of hacpo")).toEqual(["–", "cross_clip = false"]);
    expect(await table("Methods by benchmark").locator("thead th").allTextContents()).toEqual([
      ...["agent", "method", "math500", "gsm8k", "average"],
    ]);
    // a run of the study has its own accuracies and tables
    await page.getByLabel("Run", { exact: true }).selectOption("hacpo/seed-1");
    await page.getByRole("link", { name: "Overview" }).click();
    expect(await page.getByRole("img", { name: /^ada, hacpo\/seed-1: from 0.200 to 0.530/ }).count()).toBe(1);
    expect(await page.locator(".table-panel h3").allTextContents()).toEqual([
      "Held-out accuracy before and after 4 steps: hacpo/seed-1",
    ]);
    expect(problems).toEqual([]);
  });

  test("clip ranges are as wide as a reader can see, also the paper's narrow one", async () => {
    for (const name of ["plain", "paper"]) {
      const { page } = await open(browser, at(name, "teaching"));
      const figure = page.locator("figure", {
        has: page.getByRole("heading", { name: "Importance ratios of ada" }),
      });
      const bands = figure.locator(".clip-band");
      expect(await bands.count()).toBe(2); // own and cross
      for (const band of await bands.all()) expect((await band.boundingBox())!.width).toBeGreaterThan(40);
      expect(await figure.locator("svg").getAttribute("aria-label")).toMatch(/own, about \d+% within/);
      const sizes = await figure
        .locator("svg text")
        .evaluateAll((texts) =>
          texts.map(
            (text) =>
              (text.getBoundingClientRect().height / (text as SVGTextElement).getBBox().height) *
              Number.parseFloat(getComputedStyle(text).fontSize),
          ),
        );
      expect(Math.min(...sizes)).toBeGreaterThan(10); // of a letter, on the screen
      expect(await page.getByRole("heading", { name: "Alignment of own and cross gradients" }).count()).toBe(
        1,
      );
      await page.context().close();
    }
  });

  test("a point of the accuracy curve goes to its step", async () => {
    const { page } = await open(browser, at("plain", "curves"));
    const chart = page.getByRole("application", { name: /^Held-out accuracy against rollouts/ });
    await chart.focus();
    await page.keyboard.press("End");
    await page.keyboard.press("Enter");
    await expect.poll(() => page.url()).toContain("#/rollouts?step=6");
  });

  test("print is black on white, whole and without controls", async () => {
    for (const name of ["plain", "study"]) {
      for (const view of name === "study" ? ["study"] : ["overview", "teaching", "rollouts"]) {
        const { page } = await open(browser, at(name, view), { colorScheme: "dark" });
        await page.waitForTimeout(300);
        await page.emulateMedia({ media: "print", colorScheme: "dark" });
        const style = (selector: string, property: string) =>
          page
            .locator(selector)
            .first()
            .evaluate((element, key) => getComputedStyle(element).getPropertyValue(key), property);
        expect(await style("body", "background-color")).toBe("rgb(255, 255, 255)");
        expect(await style("main", "color")).toBe("rgb(26, 34, 48)");
        expect(await page.locator(".top, .toolbar, .actions:visible").filter({ visible: true }).count()).toBe(
          0,
        );
        expect(await page.locator("h1").isVisible()).toBe(true);
        await page.setViewportSize({ width: 700, height: 1000 }); // about A4; charts are still as wide as before
        for (const chart of await page.locator("figure.chart").all()) {
          const [figure, canvas] = [await chart.boundingBox(), await chart.locator("canvas").boundingBox()];
          expect(canvas!.x + canvas!.width).toBeLessThanOrEqual(figure!.x + figure!.width);
        }
        for (const cell of await page.locator(".answer .fates").all()) {
          const [card, table] = [await cell.locator("..").boundingBox(), await cell.boundingBox()];
          expect(table!.x + table!.width).toBeLessThanOrEqual(card!.x + card!.width);
        }
        const paper = await page.pdf({ format: "A4" });
        expect(paper.subarray(0, 4).toString()).toBe("%PDF");
        await page.context().close();
      }
    }
  });

  for (const scheme of ["light", "dark"] as const) {
    test(`no serious finding of axe, ${scheme}`, async () => {
      for (const [name, view] of [...VIEWS, ["study", "study"], ["hostile", "rollouts"]] as const) {
        const { page } = await open(browser, at(name, view), { colorScheme: scheme, bypassCSP: true });
        await page.waitForTimeout(400);
        await page.addScriptTag({ path: AXE });
        const found = await page.evaluate(async () => {
          // biome-ignore lint/suspicious/noExplicitAny: axe has no types here
          const { violations } = await (window as any).axe.run();
          return violations
            .filter((one: { impact: string }) => ["serious", "critical"].includes(one.impact))
            .map((one: { id: string; nodes: { html: string; failureSummary: string }[] }) =>
              [
                one.id,
                ...one.nodes.slice(0, 3).map((node) => `${node.html.slice(0, 160)} ${node.failureSummary}`),
              ].join("\n"),
            );
        });
        expect(found, `${name}, ${view}`).toEqual([]);
        await page.context().close();
      }
    });
  }

  test("both themes, and the reader's choice", async () => {
    const { page } = await open(browser, at("plain"), { colorScheme: "dark" });
    const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    expect(await ground()).toBe("rgb(16, 20, 27)");
    await page.getByRole("button", { name: "Use light colours" }).click();
    await expect.poll(ground).toBe("rgb(246, 247, 249)");
  });

  test("a phone shows everything without scrolling sideways", async () => {
    for (const [name, view] of [...VIEWS, ["study", "study"], ["hostile", "rollouts"]] as const) {
      const { page } = await open(browser, at(name, view), { viewport: { width: 360, height: 740 } });
      await page.waitForTimeout(300);
      const chosen = (await page.locator("nav [aria-current]").boundingBox())!;
      expect(chosen.x + chosen.width, `the link of ${view}`).toBeLessThanOrEqual(360);
      const width = await page.evaluate(() => document.documentElement.scrollWidth);
      expect(width, view).toBeLessThanOrEqual(360);
      await page.context().close();
    }
  });

  describe("live", () => {
    let server: ChildProcess;
    let link: string;
    beforeAll(async () => {
      server = startPython("-m", "hacrl", "watch", join(folder, "live"));
      link = await new Promise<string>((found) => {
        let text = "";
        server.stdout!.on("data", (part: Buffer) => {
          text += part;
          const address = /http:\S+/.exec(text)?.[0];
          if (address) found(address);
        });
      });
    });
    afterAll(() => {
      server?.kill();
    });

    test("updates arrive, at every viewer, also after a restart of the run", async () => {
      const viewers = [await open(browser, link), await open(browser, link)];
      const steps = (page: Page) => page.locator(".tile .value").first().textContent();
      for (const { page } of viewers) await expect.poll(() => steps(page)).toBe("2 of 6");
      const { page: zoomed } = await open(browser, `${link}#/curves`);
      const reward = zoomed.locator("figure", { has: zoomed.getByRole("heading", { name: "Reward" }) });
      const plot = (await reward.locator(".u-over").boundingBox())!;
      await zoomed.mouse.move(plot.x + plot.width * 0.3, plot.y + 40);
      await zoomed.mouse.down();
      await zoomed.mouse.move(plot.x + plot.width * 0.7, plot.y + 40, { steps: 5 });
      await zoomed.mouse.up();
      await expect.poll(() => reward.getByRole("button", { name: "Show all" }).count()).toBe(1);
      python(join(ROOT, "web/browser/go_on.py"), join(folder, "live"), "4");
      for (const { page } of viewers)
        await expect.poll(() => steps(page), { timeout: 15_000 }).toBe("4 of 6");
      // the fourth step has arrived, and the reader still looks at the part between the first two
      await expect.poll(() => reward.locator(".where").textContent(), { timeout: 15_000 }).toBe("step 4");
      expect(await reward.getByRole("button", { name: "Show all" }).count()).toBe(1);
      await reward.locator(".u-over").hover({ position: { x: plot.width - 3, y: 40 } });
      await expect.poll(() => reward.locator(".where").textContent()).toBe("step 2");
      await reward.getByRole("button", { name: "Show all" }).click();
      await expect.poll(() => reward.getByRole("button", { name: "Show all" }).count()).toBe(0);
      python(join(ROOT, "web/browser/go_on.py"), join(folder, "live"), "3"); // resumed from an earlier checkpoint
      for (const { page } of viewers)
        await expect.poll(() => steps(page), { timeout: 15_000 }).toBe("3 of 6");
      const { page, problems } = viewers[0]!;
      await page.getByRole("link", { name: "Rollouts" }).click();
      await expect.poll(() => page.locator("article").count()).toBeGreaterThan(4);
      expect(await page.locator(".live").textContent()).toBe("live");
      expect(problems).toEqual([]);
    });

    test("another address shows nothing", async () => {
      const wrong = `${link.replace(/[^/]+\/$/, "")}wrong/`;
      expect((await fetch(wrong)).status).toBe(404);
    });
  });
});

function coloursOf(canvas: Element): number {
  const { width, height } = canvas as HTMLCanvasElement;
  const { data } = (canvas as HTMLCanvasElement).getContext("2d")!.getImageData(0, 0, width, height);
  const found = new Set<number>();
  for (let i = 0; i < data.length; i += 4) found.add((data[i]! << 16) | (data[i + 1]! << 8) | data[i + 2]!);
  return found.size;
}

function focused(page: Page): Promise<string> {
  return page.evaluate(() => document.activeElement?.textContent ?? "");
}
