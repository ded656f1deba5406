import type { Series } from "./data";
import { hideHint, hintAtEvent, hintByKey } from "./hint";
import { fixed } from "./numbers";
import { Text } from "./Text";
import { visibleLine } from "./text";
import { type Colouring, tokenStyle } from "./tokens";

/** A text in its tokens, coloured, with the numbers of each; the plain text where there are no tokens. */
export function Tokens(props: {
  pieces: string[] | null;
  text: string;
  source: Series | null;
  learner: Series | undefined;
  colouring: Colouring;
  unlearnt?: [number, number][] | undefined;
}) {
  const { pieces, colouring } = props;
  const isUnlearnt = (i: number) => props.unlearnt?.some(([start, count]) => i >= start && i < start + count);
  if (!pieces || colouring === "none") {
    return (
      <pre class="text">
        <Text text={props.text} />
      </pre>
    );
  }
  return (
    // biome-ignore lint/a11y/useSemanticElements: it is text, not a form's fields
    <pre
      class="text tokens"
      // biome-ignore lint/a11y/noNoninteractiveTabindex: arrow keys read the tokens' numbers
      tabIndex={0}
      role="group"
      aria-label="Tokens. Arrow keys read the numbers of each."
      onPointerOver={hintAtEvent}
      onClick={hintAtEvent}
      onPointerLeave={hideHint}
      onBlur={hideHint}
      onKeyDown={hintByKey}
    >
      {pieces.map((piece, i) => {
        const context = isUnlearnt(i);
        const source = props.source?.[i] ?? null;
        const learner = context ? null : (props.learner?.[i] ?? null);
        const hint = [
          `token ${i + 1} ${JSON.stringify(visibleLine(piece))}`,
          context ? "not learnt: part of what the environment said" : "",
          source !== null ? `source log p ${fixed(source)}` : "",
          learner !== null ? `learner log p ${fixed(learner)}` : "",
          source !== null && learner !== null ? `ratio ${fixed(Math.exp(learner - source))}` : "",
        ];
        return (
          <span
            key={i}
            class={context ? "token context" : "token"}
            style={tokenStyle(colouring, source, learner)}
            data-hint={hint.filter(Boolean).join("\n")}
          >
            <Text text={piece} />
          </span>
        );
      })}
    </pre>
  );
}
