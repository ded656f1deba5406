/** Print how fast pages open, filter and scroll: PAGES="a.html b.html" npm run browser -- measure */

import { statSync } from "node:fs";
import { test } from "vitest";
import { launch, open } from "./browser";

const PAGES = process.env.PAGES?.split(" ") ?? [];

test.skipIf(!PAGES.length).each(PAGES.length ? PAGES : [""])("%s", { timeout: 600_000 }, async (path) => {
  const browser = await launch();
  const { page, problems } = await open(browser, `file://${path}#/overview`);
  const painted = await page.evaluate(
    () => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? Number.NaN,
  );
  const shown = await page.evaluate(async () => {
    while (!document.querySelector(".tiles")) await new Promise(requestAnimationFrame);
    return performance.now();
  });
  const curves = await timed(async () => {
    await page.getByRole("link", { name: "Curves" }).click();
    await page.waitForSelector("canvas");
  });
  const all = await timed(async () => {
    await page.getByRole("link", { name: "Rollouts" }).click();
    await page.waitForSelector("article, .banner");
    while ((await page.locator(".filters .hint").textContent())?.includes("reading"))
      await page.waitForTimeout(50);
  });
  const text = await page.locator(".filters .hint").textContent();
  const filters: number[] = [];
  for (const letter of ["t", "te", "ten", ""]) {
    filters.push(
      await page.evaluate(async (value) => {
        const box = document.querySelector<HTMLInputElement>('input[type="search"]')!;
        const start = performance.now();
        box.value = value;
        box.dispatchEvent(new Event("input", { bubbles: true }));
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        return performance.now() - start;
      }, letter),
    );
  }
  const frames = await page.evaluate(async () => {
    const list = document.querySelector(".list")!;
    const times: number[] = [];
    for (let i = 0; i < 60; i++) {
      const start = performance.now();
      list.scrollTop += 1500;
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      times.push(performance.now() - start);
    }
    return times.sort((a, b) => a - b);
  });
  const ms = (value: number) => `${Math.round(value)} ms`;
  console.log(
    [
      path,
      `${(statSync(path).size / 1e6).toFixed(1)} MB`,
      `first paint ${ms(painted)}, overview ${ms(shown)}, curves ${ms(curves)}, all rollouts read ${ms(all)}`,
      `${text}; filter ${filters.map(ms).join(", ")}; scroll median ${ms(frames[30]!)}, worst ${ms(frames[59]!)}`,
      ...problems,
    ].join("\n  "),
  );
  await browser.close();
});

async function timed(work: () => Promise<void>): Promise<number> {
  const start = performance.now();
  await work();
  return performance.now() - start;
}
