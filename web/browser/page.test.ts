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
    expect(await retokenised.locator(".token").first().getAttribute("title")).toMatch(/learner log p −/);
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
    expect(await page.getByText("corrected by Holm's method").count()).toBe(1);
    expect(await page.getByRole("row", { name: /^hacpo ada 0.02/ }).count()).toBe(1);
    expect(problems).toEqual([]);
  });

  for (const scheme of ["light", "dark"] as const) {
    test(`no serious finding of axe, ${scheme}`, async () => {
      for (const view of ["overview", "curves", "teaching", "rollouts"]) {
        const { page } = await open(browser, at("plain", view), { colorScheme: scheme, bypassCSP: true });
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
        expect(found, view).toEqual([]);
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
    for (const view of ["overview", "curves", "teaching", "rollouts"]) {
      const { page } = await open(browser, at("plain", view), { viewport: { width: 360, height: 740 } });
      await page.waitForTimeout(300);
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
      python(join(ROOT, "web/browser/go_on.py"), join(folder, "live"), "4");
      for (const { page } of viewers)
        await expect.poll(() => steps(page), { timeout: 15_000 }).toBe("4 of 6");
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
