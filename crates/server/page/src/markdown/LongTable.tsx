// A table that scrolls by itself. Of a huge one the first rows are shown until the rest is asked for.

import type { ComponentChildren, VNode } from "preact";
import { useState } from "preact/hooks";
import { number } from "../api/stats.ts";

const FIRST_ROWS = 100;

export function LongTable({ top, rows }: { top: ComponentChildren[]; rows: ComponentChildren[] }): VNode {
  const [all, setAll] = useState(false);
  const shown = all ? rows : rows.slice(0, FIRST_ROWS);
  return (
    <div class="table">
      <div class="scroll" tabIndex={0} role="group" aria-label="Table">
        <table>
          {top}
          <tbody>{shown}</tbody>
        </table>
      </div>
      {shown.length < rows.length && (
        <button type="button" class="plain" onClick={() => setAll(true)}>
          Show all {number(rows.length)} rows
        </button>
      )}
    </div>
  );
}
