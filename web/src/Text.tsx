import { visibleParts } from "./text";

/** Text of a model or data set: nothing in it has an effect, and nothing in it is invisible. */
export function Text({ text }: { text: string }) {
  return (
    <bdi>
      {visibleParts(text).map((part, i) =>
        part.escaped ? (
          <span class="escape" key={i}>
            {part.text}
          </span>
        ) : (
          part.text
        ),
      )}
    </bdi>
  );
}
