import type { RefObject } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";

/** Return a reference for a panel and the width inside it, so that text in SVG keeps its size. */
export function useWidth(first: number): [RefObject<HTMLElement | null>, number] {
  const box = useRef<HTMLElement>(null);
  const [width, setWidth] = useState(first);
  useLayoutEffect(() => {
    const target = box.current;
    if (!target) return;
    const measure = () => {
      const style = getComputedStyle(target);
      const inside =
        target.clientWidth - Number.parseFloat(style.paddingLeft) - Number.parseFloat(style.paddingRight);
      if (inside > 0) setWidth(Math.round(inside));
    };
    const observer = new ResizeObserver(measure);
    observer.observe(target);
    measure();
    return () => observer.disconnect();
  }, []);
  return [box, width];
}
