import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Source, Summary } from "./data";
import type { Route } from "./route";

export interface Page {
  summary: Summary;
  source: Source;
  route: Route;
  go: (change: Partial<Route>) => void;
  isDark: boolean;
  version: number; // grows with every live update
}

export const PageContext = createContext<Page | null>(null);

export function usePage(): Page {
  const page = useContext(PageContext);
  if (!page) throw new Error("a view was drawn outside of the page");
  return page;
}

/** Return a colour of the palette, lighter in the dark theme so that it stands out there as well. */
export function ink(colour: string | undefined, isDark: boolean): string {
  const hex = colour ?? "#777777";
  if (!isDark) return hex;
  const parts = [1, 3, 5].map((i) => Number.parseInt(hex.slice(i, i + 2), 16));
  return `#${parts
    .map((part) =>
      Math.round(part + (255 - part) * 0.32)
        .toString(16)
        .padStart(2, "0"),
    )
    .join("")}`;
}

export function agentInk(page: Page, agent: string): string {
  return ink(page.summary.agentColours[agent], page.isDark);
}

export function variantInk(page: Page, variant: string): string {
  return ink(page.summary.variantColours[variant], page.isDark);
}
