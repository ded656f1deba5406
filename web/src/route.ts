/** The reader's place, in the address after the hash, so that "back" and links work. */

export interface Route {
  view: string;
  run: number;
  step: number | null;
  prompt: string | null;
}

export function parseRoute(hash: string): Route {
  const [view = "", query = ""] = hash.replace(/^#\/?/, "").split("?");
  const values = new URLSearchParams(query);
  const number = (name: string) => {
    const text = values.get(name);
    return text !== null && /^\d{1,9}$/.test(text) ? Number(text) : null;
  };
  return { view, run: number("run") ?? 0, step: number("step"), prompt: values.get("prompt") };
}

export function formatRoute(route: Route): string {
  const values = new URLSearchParams();
  if (route.run) values.set("run", String(route.run));
  if (route.step !== null) values.set("step", String(route.step));
  if (route.prompt !== null) values.set("prompt", route.prompt);
  const query = values.toString();
  return `#/${route.view}${query ? `?${query}` : ""}`;
}
