// The figures below a reply: one line, and all of them when it is opened.

import type { VNode } from "preact";
import { details, summary, type ReplyStats } from "../api/stats.ts";

export function Figures({ stats }: { stats: ReplyStats }): VNode | null {
  const line = summary(stats);
  if (!line) return null;
  return (
    <details class="figures">
      <summary>{line}</summary>
      <dl>
        {details(stats).map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </details>
  );
}
