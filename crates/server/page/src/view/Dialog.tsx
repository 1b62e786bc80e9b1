// A dialog of the browser: it holds the focus, closes with Escape and gives the focus back.

import type { ComponentChildren, VNode } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { Icon } from "./Icon.tsx";
import { dialog } from "./layout.ts";

export function Dialog({ title, children }: { title: string; children: ComponentChildren }): VNode {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const shown = element.current;
    const before = document.activeElement as HTMLElement | null;
    if (typeof shown?.showModal === "function") shown.showModal();
    else shown?.setAttribute("open", "");
    return () => {
      // While the dialog is open, nothing behind it takes the focus.
      if (shown?.open) shown.close?.();
      before?.focus();
    };
  }, []);
  const close = (): void => {
    // The browser reports a close later, when another dialog may be open.
    if (element.current) dialog.value = null;
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    if (event.key !== "Escape" || event.isComposing) return;
    // At once: until the browser has closed the dialog and reported it, further keys would be lost.
    event.preventDefault();
    close();
  };
  return (
    <dialog
      ref={element}
      aria-labelledby="dialog-title"
      onClose={close}
      onKeyDown={onKeyDown}
      onClick={(event) => event.target === element.current && close()}
    >
      <div class="sheet">
        <header>
          <h2 id="dialog-title">{title}</h2>
          <button type="button" class="icon" aria-label="Close" onClick={close}>
            <Icon name="close" />
          </button>
        </header>
        {children}
      </div>
    </dialog>
  );
}
