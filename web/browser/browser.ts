/** Real Chromium, and pages that the Python package has made. */

import { type ChildProcess, execFileSync, spawn } from "node:child_process";
import { existsSync, mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { type Browser, type BrowserContextOptions, chromium, type Page } from "playwright-core";

export const ROOT = resolve(import.meta.dirname, "../..");
const CANDIDATES = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/google-chrome"];
export const CHROMIUM = CANDIDATES.find((path) => path && existsSync(path));
export const MISSING = "no Chromium: install it, or name it in the variable CHROMIUM";
const PYTHON = process.env.PYTHON ?? join(ROOT, ".venv/bin/python");
const ENVIRONMENT = { ...process.env, PYTHONPATH: `${join(ROOT, "src")}:${ROOT}`, PYTHONUNBUFFERED: "1" };

export function python(...command: string[]): string {
  return execFileSync(PYTHON, command, { cwd: ROOT, env: ENVIRONMENT, encoding: "utf-8" });
}

export function startPython(...command: string[]): ChildProcess {
  return spawn(PYTHON, command, { cwd: ROOT, env: ENVIRONMENT, stdio: ["ignore", "pipe", "inherit"] });
}

export function makePages(...options: string[]): string {
  const folder = mkdtempSync(join(tmpdir(), "hacrl-pages-"));
  python(join(ROOT, "web/browser/make_pages.py"), folder, ...options);
  return folder;
}

export function launch(): Promise<Browser> {
  return chromium.launch({
    executablePath: CHROMIUM,
    args: [
      "--no-sandbox",
      "--disable-gpu",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-sync",
      "--no-first-run",
    ],
  });
}

export interface Opened {
  page: Page;
  problems: string[]; // errors, warnings and refused requests
  requests: string[]; // all but the page's own
}

export async function open(
  browser: Browser,
  address: string,
  options: BrowserContextOptions = {},
): Promise<Opened> {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  const problems: string[] = [];
  const requests: string[] = [];
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) problems.push(message.text());
  });
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("dialog", (dialog) => {
    problems.push(`dialog: ${dialog.message()}`);
    void dialog.dismiss();
  });
  page.on("request", (request) => {
    if (request.url() !== address.split("#")[0]) requests.push(request.url());
  });
  await page.goto(address);
  await page.waitForSelector("main, .banner");
  return { page, problems, requests };
}
