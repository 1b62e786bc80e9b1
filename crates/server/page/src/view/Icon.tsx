// The icons, drawn as strokes on a grid of 24.

import type { VNode } from "preact";

const PATHS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 13l4 4L19 7",
  pencil: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  retry: "M20 11a8 8 0 1 0-2.3 6M20 5v6h-6",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  gear: "M4 7h9M17 7h3M15 5v4M4 17h3M11 17h9M9 15v4",
  trash: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13",
  clip: "M19 11l-7.5 7.5a4.5 4.5 0 0 1-6.4-6.4l8-8a3 3 0 0 1 4.3 4.3l-7.8 7.7a1.5 1.5 0 0 1-2.1-2.1L14.500 7",
  close: "M6 6l12 12M18 6L6 18",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM16 16l4 4",
  help: "M9 9a3 3 0 1 1 4.200 2.800c-.8.400-1.200 1-1.200 1.900v.3M12 17.500v.01",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  tool: "M14.500 6a4 4 0 0 1 5-2l-2.500 2.500.5 2 2 .5L22 6.500a4 4 0 0 1-5.500 4.600L9 18.600a2.100 2.100 0 0 1-3-3l7.600-7.500",
  more: "M6 12h.01M12 12h.01M18 12h.01",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }): VNode {
  return (
    <svg viewBox="0 0 24 24" width="20" height="20" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}
