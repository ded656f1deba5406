import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { agentInk, usePage } from "./context";
import type { Answer, Prompt, Run, View } from "./data";
import { ENDS, EpisodeTurns } from "./Episode";
import { answerMatches, type Entry, EVERYTHING, type Filter, isSolved, matching } from "./filter";
import { compact, fixed, short, signed } from "./numbers";
import { Text } from "./Text";
import { Tokens } from "./Tokens";
import { visibleLine } from "./text";
import { type Colouring, tokenStyle } from "./tokens";
import { VirtualList } from "./VirtualList";

const FATES: Record<string, string> = {
  used: "used",
  clipped_below: "clipped below",
  clipped_above: "clipped above",
  no_signal: "no signal",
  bad_update: "bad update",
  over_limit: "over limit",
  not_shared: "not shared",
  environment_failed: "dropped: environment failed",
  no_logprobs: "dropped: no log-probabilities",
  not_representable: "dropped: not representable",
  too_long: "dropped: too long",
  truncated: "dropped: truncated",
  non_finite: "dropped: not finite",
  empty: "dropped: empty",
};

export function Rollouts({ run, number }: { run: Run; number: number }) {
  const page = usePage();
  const { entries, loaded, error } = useEntries(run, number);
  const [filter, setFilter] = useState<Filter>({ ...EVERYTHING, step: page.route.step });
  const [colouring, setColouring] = useState<Colouring>("source");
  const [learner, setLearner] = useState(0);
  const [onlyMatching, setOnlyMatching] = useState(false);
  useEffect(() => setFilter((old) => ({ ...old, step: page.route.step })), [page.route.step]);

  const shown = useMemo(() => matching(entries, filter), [entries, filter]);
  const chosen = Math.max(
    0,
    shown.findIndex(
      ({ step, prompt }) =>
        prompt.id === page.route.prompt && (filter.step !== null || step === selectedStep.current),
    ),
  );
  const entry = shown[chosen];
  const answers = useMemo(
    () =>
      shown.reduce(
        (sum, { prompt }) => sum + prompt.rollouts.filter((one) => answerMatches(one, filter)).length,
        0,
      ),
    [shown, filter],
  );
  const kept = run.rollouts.reduce((sum, step) => sum + step.kept, 0);
  const total = run.rollouts.reduce((sum, step) => sum + step.total, 0);
  const shortened = run.rollouts.reduce((sum, step) => sum + step.shortened, 0);
  const verdicts = useMemo(
    () => [...new Set(entries.flatMap(({ prompt }) => prompt.rollouts.map((one) => one.v)))].sort(),
    [entries],
  );
  const ends = useMemo(
    () =>
      [
        ...new Set(entries.flatMap(({ prompt }) => prompt.rollouts.flatMap((one) => one.e?.end ?? []))),
      ].sort(),
    [entries],
  );
  const select = (i: number) => {
    const next = shown[i];
    if (!next) return;
    selectedStep.current = next.step;
    page.go({ prompt: next.prompt.id });
  };
  const change = (part: Partial<Filter>) => setFilter({ ...filter, ...part });
  if (!run.rollouts.length) {
    return (
      <p class="banner">
        This run has no rollout log: no step is done yet, or the recipe has <code>keep_rollouts: none</code>.
      </p>
    );
  }
  return (
    <div class="stack">
      <search class="toolbar filters" aria-label="Filter rollouts">
        <label>
          Step{" "}
          <select
            aria-label="Step"
            value={filter.step ?? ""}
            onChange={(event) => {
              const step = event.currentTarget.value;
              page.go({ step: step === "" ? null : Number(step), prompt: null });
            }}
          >
            <option value="">all</option>
            {run.rollouts.map(({ step }) => (
              <option key={step} value={step}>
                {step}
              </option>
            ))}
          </select>
        </label>
        <label>
          Agent{" "}
          <select
            aria-label="Agent"
            value={filter.agent ?? ""}
            onChange={(event) =>
              change({ agent: event.currentTarget.value === "" ? null : Number(event.currentTarget.value) })
            }
          >
            <option value="">any</option>
            {run.agents.map(({ name }, i) => (
              <option key={name} value={i}>
                {visibleLine(name)}
              </option>
            ))}
          </select>
        </label>
        <Choice
          label="Verdict"
          value={filter.verdict}
          any="any"
          options={verdicts.map((one) => [one, one])}
          set={(verdict) => change({ verdict })}
        />
        <Choice
          label="Reward"
          value={filter.reward}
          any="any"
          options={[
            ["=1", "1"],
            ["mid", "between"],
            ["=0", "0"],
            ["<0", "below 0"],
            [">1", "above 1"],
          ]}
          set={(reward) => change({ reward })}
        />
        <Choice
          label="Fate"
          value={filter.fate}
          any="any"
          options={[
            ["used", "used"],
            ["clipped_below", "clipped below"],
            ["clipped_above", "clipped above"],
            ["no_signal", "no signal"],
            ["over_limit", "over limit"],
            ["dropped", "dropped"],
          ]}
          set={(fate) => change({ fate })}
        />
        {ends.length > 0 && (
          <Choice
            label="Ended"
            value={filter.end}
            any="any"
            options={ends.map((one) => [one, ENDS[one] ?? one])}
            set={(end) => change({ end })}
          />
        )}
        <Choice
          label="Prompts"
          value={filter.only}
          any="all"
          options={[
            ["one", "only one agent solved it"],
            ["split", "solved by some answers"],
            ["partner", "learnt from by a partner"],
          ]}
          set={(only) => change({ only: only as Filter["only"] })}
        />
        <label class="wide">
          Text{" "}
          <input
            type="search"
            value={filter.text}
            placeholder="in prompts and answers"
            onInput={(event) => change({ text: event.currentTarget.value })}
          />
        </label>
        <p class="hint" aria-live="polite">
          <b>{short(answers)}</b> answers to <b>{short(shown.length)}</b> prompts match
          {loaded < run.rollouts.length && `; reading, ${loaded} of ${run.rollouts.length} steps`}
        </p>
      </search>
      {error && <p class="banner">{error}</p>}
      <div class="browser">
        <VirtualList
          label="Prompts"
          count={shown.length}
          rowHeight={60}
          selected={chosen}
          onSelect={select}
          row={(i) => <PromptRow run={run} entry={shown[i]!} />}
        />
        <section class="detail" aria-label="One prompt with all answers">
          {entry ? (
            <>
              <PromptHead entry={entry} />
              <div class="toolbar tight">
                <label>
                  Colour tokens by{" "}
                  <select
                    aria-label="Colour tokens by"
                    value={colouring}
                    onChange={(event) => setColouring(event.currentTarget.value as Colouring)}
                  >
                    <option value="none">nothing</option>
                    <option value="source">log-probability of the source</option>
                    <option value="learner">log-probability of the learner</option>
                    <option value="ratio">ratio of learner to source</option>
                  </select>
                </label>
                <label>
                  Learner{" "}
                  <select
                    aria-label="Learner"
                    value={learner}
                    onChange={(event) => setLearner(Number(event.currentTarget.value))}
                  >
                    {run.agents.map(({ name }, i) => (
                      <option key={name} value={i}>
                        {visibleLine(name)}
                      </option>
                    ))}
                  </select>
                </label>
                <label class="check">
                  <input
                    type="checkbox"
                    checked={onlyMatching}
                    onChange={(event) => setOnlyMatching(event.currentTarget.checked)}
                  />{" "}
                  matching answers only
                </label>
                <Scale colouring={colouring} />
              </div>
              <div class="answers" style={{ "--columns": String(run.agents.length) }}>
                {run.agents.map(({ name }, agent) => {
                  const own = entry.prompt.rollouts.filter((one) => one.a === agent);
                  const matches = own.filter((one) => answerMatches(one, filter));
                  const solved = own.filter(isSolved).length;
                  return (
                    <section key={name} class="column" aria-label={`Answers of ${name}`}>
                      <h4>
                        <i class="swatch" style={{ background: agentInk(page, name) }} />
                        <Text text={name} />{" "}
                        <span class="quiet">
                          {solved} of {own.length} solved
                        </span>
                      </h4>
                      {(onlyMatching ? matches : own).map((answer) => (
                        <AnswerCard
                          key={`${entry.step} ${entry.prompt.id} ${answer.i}`}
                          run={run}
                          answer={answer}
                          colouring={colouring}
                          learner={learner}
                          isDim={!matches.includes(answer)}
                          pickLearner={(which) => {
                            setLearner(which);
                            if (colouring === "none" || colouring === "source") setColouring("learner");
                          }}
                        />
                      ))}
                    </section>
                  );
                })}
              </div>
            </>
          ) : (
            <p class="quiet empty">{loaded ? "No rollout matches." : "Reading…"}</p>
          )}
        </section>
      </div>
      <p class="note">
        This page holds {short(kept)} of the log's {short(total)} rollouts
        {kept < total
          ? ": whole prompts with all answers, drawn at random in each step, as many as fit into a page of a convenient size."
          : ": all of them."}
        {shortened > 0 && ` ${short(shortened)} of them are without single tokens, because they are long.`}
      </p>
    </div>
  );
}

const selectedStep: { current: number | null } = { current: null };

/** Read the steps' rollouts one after the other, the wanted one first, without stopping the reader. */
function useEntries(run: Run, number: number) {
  const page = usePage();
  const [state, setState] = useState<{ entries: Entry[]; loaded: number; error: string }>({
    entries: [],
    loaded: 0,
    error: "",
  });
  const steps = useRef(new Map<string, Entry[]>());
  const wanted = page.route.step;
  const known = run.rollouts.map(({ step, total }) => `${step}:${total}`).join();
  useEffect(() => {
    let isOver = false;
    const order = [...run.rollouts].sort(
      (a, b) => Number(b.step === wanted) - Number(a.step === wanted) || a.step - b.step,
    );
    const publish = () => {
      const parts = run.rollouts.map(
        ({ step, total }) => steps.current.get(`${number} ${step} ${total}`) ?? [],
      );
      const loaded = run.rollouts.filter(({ step, total }) =>
        steps.current.has(`${number} ${step} ${total}`),
      ).length;
      setState({ entries: parts.flat(), loaded, error: "" });
    };
    const load = async () => {
      let shownAt = 0;
      for (const { step, total } of order) {
        const key = `${number} ${step} ${total}`;
        if (!steps.current.has(key)) {
          const found = await page.source.rollouts(number, step);
          if (isOver) return;
          steps.current.set(
            key,
            found.prompts.map((prompt) => ({ step, prompt })),
          );
        }
        if (performance.now() - shownAt > 250) {
          publish();
          shownAt = performance.now();
          await new Promise((done) => setTimeout(done));
          if (isOver) return;
        }
      }
      publish();
    };
    load().catch((problem: Error) => !isOver && setState((old) => ({ ...old, error: problem.message })));
    return () => {
      isOver = true;
    };
  }, [number, known, wanted, page.source]);
  return state;
}

function Choice(props: {
  label: string;
  value: string;
  any: string;
  options: [string, string][];
  set: (value: string) => void;
}) {
  return (
    <label>
      {props.label}{" "}
      <select
        aria-label={props.label}
        value={props.value}
        onChange={(event) => props.set(event.currentTarget.value)}
      >
        <option value="">{props.any}</option>
        {props.options.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

function PromptRow({ run, entry }: { run: Run; entry: Entry }) {
  const page = usePage();
  return (
    <>
      <span class="row-title">{visibleLine(entry.prompt.prompt.trim().slice(-160)) || "(empty prompt)"}</span>
      <span class="row-facts">
        <span class="quiet">step {entry.step}</span>
        {run.agents.map(({ name }, i) => {
          const own = entry.prompt.rollouts.filter((one) => one.a === i);
          const solved = own.filter(isSolved).length;
          return (
            <span key={name} class="score" title={`${visibleLine(name)}: ${solved} of ${own.length} solved`}>
              <i class="swatch" style={{ background: agentInk(page, name) }} />
              {solved}/{own.length}
            </span>
          );
        })}
      </span>
    </>
  );
}

function PromptHead({ entry }: { entry: Entry }) {
  const { prompt } = entry;
  return (
    <header class="prompt">
      {prompt.context?.map((turn, i) => (
        <p key={i} class="turn">
          <span class="quiet">{turn.role}</span> <Text text={turn.content} />
        </p>
      ))}
      <pre class="prompt-text">
        <Text text={prompt.prompt} />
      </pre>
      {prompt.tools && (
        <ul class="tools" aria-label="Tools">
          {prompt.tools.map((tool) => (
            <li key={tool.name} title={visibleLine(tool.text)}>
              <Text text={tool.name} />
            </li>
          ))}
        </ul>
      )}
      <p class="gold">
        <span class="quiet">gold answer</span>{" "}
        <b>
          <Text text={prompt.answer || "–"} />
        </b>{" "}
        <span class="quiet">
          step {entry.step} · <Text text={prompt.id} />
        </span>
      </p>
    </header>
  );
}

function AnswerCard(props: {
  run: Run;
  answer: Answer;
  colouring: Colouring;
  learner: number;
  isDim: boolean;
  pickLearner: (learner: number) => void;
}) {
  const page = usePage();
  const { run, answer, colouring } = props;
  const view = answer.k.find((one) => one.a === props.learner);
  const name = (agent: number) => run.agents[agent]?.name ?? "?";
  const kind = answer.v === "scored" ? "scored" : isSolved(answer) ? "right" : "wrong";
  const own = view && !view.p ? view.l : undefined; // the learner's log-probabilities of the source's tokens
  return (
    <article class={`answer ${kind} ${props.isDim ? "dim" : ""}`}>
      <header>
        <span class={`verdict ${kind}`}>{answer.v}</span>
        <span class="quiet">
          #{answer.i} · reward {compact(answer.r)} · {answer.n} tokens
          {answer.f === "length" && <b> · cut</b>}
        </span>
      </header>
      {answer.x && colouring !== "none" && (
        <p class="note">The page leaves out this answer's tokens, to stay small.</p>
      )}
      {answer.e ? (
        <EpisodeTurns episode={answer.e} learner={own} colouring={colouring} />
      ) : (
        <Tokens pieces={answer.p} text={answer.t} source={answer.l} learner={own} colouring={colouring} />
      )}
      {view?.p && colouring !== "none" && (
        <div class="retokenised">
          <span class="quiet">
            as <Text text={name(view.a)} /> reads it, {view.n} tokens
          </span>
          <Tokens
            pieces={view.p}
            text={answer.t}
            source={null}
            learner={view.l}
            colouring="learner"
            unlearnt={view.o}
          />
        </div>
      )}
      {answer.k.length > 0 && (
        <table class="fates">
          <thead>
            <tr>
              <th scope="col">learner</th>
              <th scope="col">fate</th>
              <th scope="col" class="number" title="importance ratio at the first use">
                s
              </th>
              <th scope="col" class="number" title="advantage">
                A
              </th>
              <th scope="col" class="number" title="weight in the update">
                weight
              </th>
            </tr>
          </thead>
          <tbody>
            {answer.k.map((one) => (
              <FateRow
                key={one.a}
                view={one}
                name={name(one.a)}
                colour={agentInk(page, name(one.a))}
                isChosen={one.a === props.learner}
                pick={() => props.pickLearner(one.a)}
              />
            ))}
          </tbody>
        </table>
      )}
    </article>
  );
}

function FateRow(props: { view: View; name: string; colour: string; isChosen: boolean; pick: () => void }) {
  const { view } = props;
  return (
    <tr class={props.isChosen ? "chosen" : ""}>
      <th scope="row">
        <button
          type="button"
          class="link"
          aria-pressed={props.isChosen}
          onClick={props.pick}
          title="Show this learner's view"
        >
          <i class="swatch" style={{ background: props.colour }} />
          <Text text={props.name} />
        </button>
      </th>
      <td class={`fate ${view.f === "used" ? "used" : ""}`}>{FATES[view.f] ?? visibleLine(view.f)}</td>
      <td class="number">{fixed(view.s, 2)}</td>
      <td class="number">{signed(view.A, 2)}</td>
      <td class="number">{compact(view.w)}</td>
    </tr>
  );
}

function Scale({ colouring }: { colouring: Colouring }) {
  if (colouring === "none") return null;
  const isRatio = colouring === "ratio";
  const marks = isRatio ? [0.5, 0.8, 1, 1.25, 2] : [0, -1, -2, -4, -6];
  return (
    <span
      class="scale"
      role="img"
      aria-label={isRatio ? "orange below 1, blue above 1" : "darker is less likely"}
    >
      {marks.map((mark) => (
        <span
          key={mark}
          style={isRatio ? tokenStyle("ratio", 0, Math.log(mark)) : tokenStyle("source", mark, null)}
        >
          {isRatio ? mark : fixed(mark, 0)}
        </span>
      ))}
    </span>
  );
}

export type { Prompt };
