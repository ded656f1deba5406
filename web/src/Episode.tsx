import type { Episode, EpisodeTurn, Series } from "./data";
import { compact } from "./numbers";
import { Text } from "./Text";
import { Tokens } from "./Tokens";
import type { Colouring } from "./tokens";

export const ENDS: Record<string, string> = {
  done: "the environment ended it",
  answered: "answered without a tool",
  max_turns: "limit of turns",
  max_tokens: "limit of tokens",
  max_seconds: "limit of time",
  failed: "the environment failed",
};

/** The turns of an episode in order: what the agent wrote, and what the environment answered. */
export function EpisodeTurns(props: { episode: Episode; learner: Series | undefined; colouring: Colouring }) {
  const { episode, colouring } = props;
  const starts = tokenStarts(episode.turns);
  let action = 0;
  return (
    <ol class="episode">
      {episode.opening && (
        <li class="observation">
          <span class="who">reset</span>
          <pre class="text">
            <Text text={episode.opening} />
          </pre>
        </li>
      )}
      {episode.turns.map((turn, i) => {
        if (turn.o) return <Observation key={i} turn={turn} />;
        action += 1;
        const start = starts[i]!;
        return (
          <li key={i} class="action">
            <span class="who">
              turn {action}
              {turn.c?.map(([name], which) => (
                <span key={which} class="call">
                  <Text text={name} />
                </span>
              ))}
              {turn.r !== undefined && <span class="turn-reward">reward {compact(turn.r)}</span>}
            </span>
            <Tokens
              pieces={turn.p ?? null}
              text={turn.t}
              source={turn.l ?? null}
              learner={props.learner?.slice(start, start + turn.n)}
              colouring={colouring}
            />
          </li>
        );
      })}
      <li class="end">
        {ENDS[episode.end] ?? episode.end}
        {episode.failure && (
          <>
            {": "}
            <Text text={episode.failure} />
          </>
        )}
      </li>
    </ol>
  );
}

function Observation({ turn }: { turn: EpisodeTurn }) {
  return (
    <li class="observation">
      {turn.o!.map(([who, said], i) => (
        <div key={i}>
          <span class="who">
            <Text text={who} />
          </span>
          <pre class="text">
            <Text text={said} />
          </pre>
        </div>
      ))}
    </li>
  );
}

/** Return at which token of the episode each turn begins. */
export function tokenStarts(turns: EpisodeTurn[]): number[] {
  let tokens = 0;
  return turns.map(({ n }) => {
    tokens += n;
    return tokens - n;
  });
}
