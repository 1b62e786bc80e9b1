// A formula as MathML, which browsers draw and screen readers speak.

import type { VNode } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import temml from "temml";

/** A longer formula is shown as its source: it is more likely an attack than mathematics. */
const MOST_CHARACTERS = 10_000;

export function Formula({ source, isBlock }: { source: string; isBlock: boolean }): VNode {
  const place = useRef<HTMLElement>(null);
  useLayoutEffect(() => {
    const element = place.current;
    if (!element) return;
    try {
      if (source.length > MOST_CHARACTERS) throw new RangeError("too long");
      // The library builds elements; commands that make links or attributes are not trusted.
      const options = { displayMode: isBlock, throwOnError: true, trust: false, maxExpand: 200, maxSize: [20, 200] as [number, number] };
      temml.render(source, element, options);
    } catch {
      element.textContent = isBlock ? source : `$${source}$`;
    }
  }, [source, isBlock]);
  if (!isBlock) return <span class="formula" ref={place} />;
  // A wide formula is scrolled, also by keyboard.
  return <div class="formula block" ref={place as never} tabIndex={0} role="group" aria-label="Formula" />;
}
