/** The numbers of one token, shown at once: under a pointer, a finger, or the arrow keys. */

let shown: HTMLElement | null = null; // the token
let box: HTMLElement | null = null;

/** Show the hint of the token that an event is about; hide it where there is none. */
export function hintAtEvent(event: Event): void {
  const token = (event.target as Element).closest<HTMLElement>("[data-hint]");
  if (token) show(token);
  else hideHint();
}

/** Move along the tokens of a text with the arrow keys, Home and End; Escape hides the hint. */
export function hintByKey(event: KeyboardEvent): void {
  const tokens = [...(event.currentTarget as Element).querySelectorAll<HTMLElement>("[data-hint]")];
  if (event.key === "Escape") {
    hideHint();
    return;
  }
  const here = shown ? tokens.indexOf(shown) : -1;
  const moves: Record<string, number> = {
    ArrowLeft: here - 1,
    ArrowRight: here + 1,
    Home: 0,
    End: tokens.length - 1,
  };
  if (!(event.key in moves) || !tokens.length) return;
  event.preventDefault();
  const token = tokens[Math.min(tokens.length - 1, Math.max(0, moves[event.key]!))]!;
  token.scrollIntoView({ block: "nearest" });
  show(token);
}

export function hideHint(): void {
  shown?.classList.remove("hinted");
  shown = null;
  if (box) box.hidden = true;
}

function show(token: HTMLElement): void {
  hideHint();
  if (!box) {
    box = document.createElement("div");
    box.className = "hint-box";
    box.setAttribute("role", "status");
    document.body.append(box);
    addEventListener("scroll", hideHint, { passive: true });
    addEventListener("hashchange", hideHint);
    addEventListener("popstate", hideHint);
  }
  shown = token;
  token.classList.add("hinted");
  box.textContent = token.dataset.hint ?? "";
  box.hidden = false;
  const place = token.getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  const below = place.bottom + 6;
  box.style.left = `${Math.max(6, Math.min(innerWidth - width - 6, place.left))}px`;
  box.style.top = `${below + height < innerHeight ? below : place.top - height - 6}px`;
}
