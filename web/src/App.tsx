import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Curves } from "./Curves";
import { PageContext } from "./context";
import { type Source, type Summary, served } from "./data";
import { asCsv, asLatex, fileName, save } from "./export";
import { Overview } from "./Overview";
import { Rollouts } from "./Rollouts";
import { formatRoute, parseRoute, type Route } from "./route";
import { Study } from "./Study";
import { TeachingView } from "./Teaching";
import { visibleLine } from "./text";

const VIEWS: [string, string][] = [
  ["study", "Study"],
  ["overview", "Overview"],
  ["curves", "Curves"],
  ["teaching", "Who taught whom"],
  ["rollouts", "Rollouts"],
];
const DARK = "(prefers-color-scheme: dark)";

export function App({ first, source }: { first: Summary; source: Source }) {
  const [summary, setSummary] = useState(first);
  const [version, setVersion] = useState(0);
  const [connection, setConnection] = useState("");
  const [route, setRoute] = useState<Route>(parseRoute(location.hash));
  const [theme, setTheme] = useState<"light" | "dark" | null>(null);
  const [system, setSystem] = useState(matchMedia(DARK).matches);
  const isDark = theme ? theme === "dark" : system;

  useEffect(() => {
    const onHash = () => setRoute(parseRoute(location.hash));
    const query = matchMedia(DARK);
    const onScheme = () => setSystem(query.matches);
    addEventListener("popstate", onHash);
    query.addEventListener("change", onScheme);
    return () => {
      removeEventListener("popstate", onHash);
      query.removeEventListener("change", onScheme);
    };
  }, []);
  useEffect(() => {
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
  }, [isDark]);
  useEffect(() => {
    if (!first.live) return;
    const events = new EventSource("events");
    events.onopen = () => setConnection("live");
    events.onerror = () => setConnection("waiting for hacrl watch");
    events.onmessage = () => {
      served
        .summary()
        .then((found) => {
          setSummary(found);
          setVersion((old) => old + 1);
          setConnection("live");
        })
        .catch((problem: Error) => setConnection(problem.message));
    };
    return () => events.close();
  }, [first.live]);

  const views = VIEWS.filter(([name]) => name !== "study" || summary.study);
  const number = Math.min(route.run, summary.runs.length - 1);
  const run = summary.runs[number]!;
  const view = views.some(([name]) => name === route.view) ? route.view : views[0]![0];
  const current = useRef(route);
  current.current = { ...route, view };
  const go = (change: Partial<Route>) => {
    const next = { ...current.current, ...change };
    // a choice within the same list is not a place to go back to
    const isPlace =
      next.view !== view || next.run !== current.current.run || next.step !== current.current.step;
    history[isPlace ? "pushState" : "replaceState"](null, "", formatRoute(next));
    current.current = next; // for keys that are pressed before the page is drawn again
    setRoute(next);
  };
  const page = useMemo(
    () => ({ summary, source, route: { ...route, view }, go, isDark, version }),
    [summary, route, isDark, version],
  );
  useEffect(() => {
    // on a phone the links scroll sideways
    document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  }, [view]);
  useEffect(() => {
    document.title = `${summary.study ? "study" : visibleLine(run.name)} · hacrl`;
  }, [run.name]);
  const saveTables = (suffix: "csv" | "tex") => {
    for (const table of summary.tables.filter((one) => one.run === null || one.run === number)) {
      save(
        suffix === "csv" ? asCsv(table) : asLatex(table),
        `${fileName(table.name)}.${suffix}`,
        "text/plain",
      );
    }
  };
  return (
    <PageContext.Provider value={page}>
      <button type="button" class="skip" onClick={() => document.getElementById("main")?.focus()}>
        Skip to the content
      </button>
      <header class="top">
        <span class="brand">hacrl</span>
        {summary.runs.length > 1 ? (
          <select
            class="run"
            aria-label="Run"
            value={number}
            onChange={(event) => go({ run: Number(event.currentTarget.value), prompt: null })}
          >
            {summary.runs.map((one, i) => (
              <option key={one.name} value={i}>
                {visibleLine(one.name)}
              </option>
            ))}
          </select>
        ) : (
          <span class="run-name">{visibleLine(run.name)}</span>
        )}
        <nav aria-label="Views">
          {views.map(([name, label]) => (
            <a
              key={name}
              href={formatRoute({ ...route, view: name, prompt: null })}
              aria-current={name === view ? "page" : undefined}
            >
              {label}
            </a>
          ))}
        </nav>
        <div class="actions">
          {summary.live && (
            <span class={`live ${connection === "live" ? "on" : ""}`} role="status">
              {connection || "connecting"}
            </span>
          )}
          <details class="menu">
            <summary>Export</summary>
            <div>
              <button type="button" onClick={() => saveTables("csv")}>
                Tables as CSV
              </button>
              <button type="button" onClick={() => saveTables("tex")}>
                Tables as LaTeX
              </button>
              <button type="button" onClick={() => print()}>
                Print this view
              </button>
            </div>
          </details>
          <button
            type="button"
            class="theme"
            aria-label={isDark ? "Use light colours" : "Use dark colours"}
            onClick={() => setTheme(isDark ? "light" : "dark")}
          >
            {isDark ? "☀" : "☾"}
          </button>
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        <h1 class="visually-hidden">
          {views.find(([name]) => name === view)![1]}: {visibleLine(run.name)}
        </h1>
        {view === "study" && <Study />}
        {view === "overview" && <Overview run={run} />}
        {view === "curves" && <Curves run={run} />}
        {view === "teaching" && <TeachingView run={run} key={number} />}
        {view === "rollouts" && <Rollouts run={run} number={number} key={number} />}
      </main>
    </PageContext.Provider>
  );
}
