import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

const EXTRA = 6; // rows above and below those in sight

interface Props {
  label: string;
  count: number;
  rowHeight: number;
  selected: number;
  onSelect: (row: number) => void;
  row: (row: number) => ComponentChildren;
}

/** A list that draws only the rows in sight, so that its length does not matter. */
export function VirtualList(props: Props) {
  const { count, rowHeight, selected } = props;
  const box = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(600);
  useLayoutEffect(() => {
    const target = box.current!;
    const observer = new ResizeObserver(() => setHeight(target.clientHeight));
    observer.observe(target);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    const target = box.current!;
    const y = selected * rowHeight;
    if (y < target.scrollTop) target.scrollTop = y;
    else if (y + rowHeight > target.scrollTop + target.clientHeight) {
      target.scrollTop = y + rowHeight - target.clientHeight;
    }
  }, [selected, rowHeight]);
  const first = Math.max(0, Math.floor(top / rowHeight) - EXTRA);
  const end = Math.min(count, Math.ceil((top + height) / rowHeight) + EXTRA);
  const rows = Array.from({ length: Math.max(0, end - first) }, (_, i) => first + i);
  const onKeyDown = (event: KeyboardEvent) => {
    const page = Math.max(1, Math.floor(height / rowHeight) - 1);
    const moves: Record<string, number> = {
      ArrowDown: selected + 1,
      ArrowUp: selected - 1,
      PageDown: selected + page,
      PageUp: selected - page,
      Home: 0,
      End: count - 1,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    props.onSelect(Math.min(count - 1, Math.max(0, moves[event.key]!)));
  };
  return (
    <div
      ref={box}
      class="list"
      role="listbox"
      tabIndex={0}
      aria-label={props.label}
      aria-activedescendant={count ? `row-${selected}` : undefined}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
      onKeyDown={onKeyDown}
    >
      <div style={{ height: `${count * rowHeight}px`, position: "relative" }} role="presentation">
        {rows.map((row) => (
          // biome-ignore lint/a11y/useKeyWithClickEvents: the list handles keys
          <div
            key={row}
            id={`row-${row}`}
            class="row"
            role="option"
            tabIndex={-1}
            aria-selected={row === selected}
            aria-posinset={row + 1}
            aria-setsize={count}
            style={{ top: `${row * rowHeight}px`, height: `${rowHeight}px` }}
            onClick={() => props.onSelect(row)}
          >
            {props.row(row)}
          </div>
        ))}
      </div>
    </div>
  );
}
