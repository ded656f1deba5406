/** The page's data: what `hacrl report` writes and `hacrl watch` sends. */

export type Series = (number | null)[];
export type Columns = Record<string, Series>;

export interface Cell {
  t: string; // as shown
  v: string | number | null;
  s?: number | null; // the spread of a mean, which CSV has in a column of its own
}

export interface Table {
  name: string;
  title: string;
  note: string;
  kind: string; // "study", "results", "teaching", "time", "benchmarks"
  run: number | null; // the number of the run that it is about
  columns: string[];
  rows: Cell[][];
}

export interface Accuracy {
  mean: number;
  stderr: number;
  problems: number;
  samples: number;
}

export interface StepIndex {
  step: number;
  total: number;
  kept: number;
  prompts: number;
  keptPrompts: number;
  shortened: number; // rollouts of which the page holds no tokens, because they are too large for it
  ratios: Record<string, [number, number][]>; // "learner>source" -> [bin, rollouts]
  fates: Record<string, Record<string, number>>;
}

export interface Run {
  name: string;
  folder: string;
  variant: string;
  seed: number;
  method: Record<string, unknown> & { name: string };
  task: string;
  agents: { name: string; model: string }[];
  planned: number;
  status: { state?: string; message?: string };
  config: string;
  steps: number[];
  metrics: Record<string, Columns>;
  pairs: Record<string, Record<string, Columns>>;
  dropped: Record<string, Record<string, Record<string, number>>>;
  evaluations: { step: number; agents: Record<string, Accuracy> }[];
  seconds: Columns;
  notes: string[];
  totals: Record<string, { rollouts: number; tokens: number; updates: number }>;
  clip: { own: [number, number] | null; cross: [number, number] | null };
  bins: { own: [number, number]; cross: [number, number] }; // of ratios: where the first begins, their width
  rollouts: StepIndex[];
}

export interface StudyCurve {
  agent: string;
  variant: string;
  rollouts: number[];
  steps: number[];
  mean: number[];
  low: Series;
  high: Series;
  seeds: number[][];
}

export interface Summary {
  schema: number;
  version: string;
  live: boolean;
  agentColours: Record<string, string>;
  variantColours: Record<string, string>;
  runs: Run[];
  tables: Table[];
  study: { reference: string; curves: StudyCurve[] } | null;
}

/** What one learner made of an answer. */
export interface View {
  a: number; // learner, as a number of the run's agents
  f: string; // fate
  A: number | null; // advantage
  s: number | null; // ratio
  c: number | null; // share clipped
  w: number | null; // weight in the update
  l?: Series; // log-probabilities of the response's tokens
  p?: string[] | null; // the learner's tokens, if they are not the source's
  n?: number;
  o?: [number, number][]; // runs of tokens that are not learnt: where each begins, how many it has
}

/** One action of an agent, or what its environment answered. */
export interface EpisodeTurn {
  n: number; // tokens
  t: string; // text, in the source's own format
  p?: string[] | null; // of an action: token texts
  l?: Series; // of an action: log-probabilities
  c?: [string, string][]; // of an action: tools called, with their arguments
  r?: number; // of an action: reward, if every turn has one
  o?: [string, string][]; // of an observation: who says what
}

export interface Episode {
  end: string;
  turns: EpisodeTurn[];
  opening?: string;
  failure?: string;
}

export interface Answer {
  a: number; // agent
  i: number; // sample
  t: string; // text
  v: string; // verdict
  r: number; // reward
  f: string; // finish reason
  n: number; // tokens
  p: string[] | null; // token texts
  l: Series; // log-probabilities
  k: View[];
  e?: Episode; // instead of p and l
  x?: 1; // its tokens were left out
}

export interface Prompt {
  id: string;
  prompt: string;
  answer: string;
  context?: { role: string; content: string }[];
  tools?: { name: string; text: string }[];
  rollouts: Answer[];
}

export interface StepRollouts {
  step: number;
  prompts: Prompt[];
}

/** Return JSON data from base64 of gzip. */
export async function decode<T>(text: string): Promise<T> {
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text()) as T;
}

export interface Source {
  summary(): Promise<Summary>;
  rollouts(run: number, step: number): Promise<StepRollouts>;
}

/** Data that lie in the page. */
export const embedded: Source = {
  summary: () => decode<Summary>(content("summary")),
  rollouts: (run, step) => decode<StepRollouts>(content(`rollouts-${run}-${step}`)),
};

function content(id: string): string {
  const element = document.getElementById(id);
  if (!element?.textContent) throw new Error(`The page has no data named ${id}: it is damaged.`);
  return element.textContent;
}

/** Data of `hacrl watch`, below the page's own secret address. */
export const served: Source = {
  summary: async () => decode<Summary>(await fetched("summary")),
  rollouts: async (run, step) => decode<StepRollouts>(await fetched(`rollouts/${run}/${step}`)),
};

async function fetched(path: string): Promise<string> {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`hacrl watch answered ${answer.status}: ${await answer.text()}`);
  return answer.text();
}
