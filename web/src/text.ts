/** Text of models and data sets is data: what a reader cannot see is shown as an escape. */

// Controls but tab and newline; formats (bidirectional, zero width, tags); lone surrogates; line separators.
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/u;
const INVISIBLE_RUN = /([\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}])/u;

export interface Part {
  text: string;
  escaped: boolean;
}

/** Return the text in parts; each invisible character is a part of its own, written as an escape. */
export function visibleParts(text: string): Part[] {
  if (!INVISIBLE.test(text)) return text ? [{ text, escaped: false }] : [];
  const parts: Part[] = [];
  for (const piece of text.split(INVISIBLE_RUN)) {
    if (!piece) continue;
    const isHidden = piece !== "\n" && piece !== "\t" && INVISIBLE.test(piece);
    const last = parts.at(-1);
    if (!isHidden && last && !last.escaped) last.text += piece;
    else parts.push({ text: isHidden ? escaped(piece) : piece, escaped: isHidden });
  }
  return parts;
}

/** Return one line in which every invisible character is an escape. */
export function visibleLine(text: string): string {
  return visibleParts(text.replace(/[\n\t]+/g, " "))
    .map((part) => part.text)
    .join("");
}

function escaped(character: string): string {
  const code = character.codePointAt(0)!;
  if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
  return code < 0x10000
    ? `\\u${code.toString(16).padStart(4, "0")}`
    : `\\U${code.toString(16).padStart(8, "0")}`;
}
