import type { VNode } from "preact";
import { useState } from "preact/hooks";
import { announcement } from "../state/runs.ts";
import { Icon } from "./Icon.tsx";

/** Puts text on the clipboard; pages of another host than localhost have no clipboard without TLS. */
export async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "unseen";
    const focused = document.activeElement as HTMLElement | null;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return done;
  }
}

export function CopyButton({ text, label }: { text: string; label: string }): VNode {
  const [done, setDone] = useState(false);
  const onClick = async (): Promise<void> => {
    const copied = await copy(text);
    announcement.value = copied ? "Copied." : "The browser refused to copy.";
    setDone(copied);
    setTimeout(() => setDone(false), 1500);
  };
  return (
    <button type="button" class="icon" aria-label={label} title={label} onClick={() => void onClick()}>
      <Icon name={done ? "check" : "copy"} />
    </button>
  );
}
