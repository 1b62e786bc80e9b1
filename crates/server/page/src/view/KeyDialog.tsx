// The API key: kept for this tab, or in this browser if that is asked for.

import type { VNode } from "preact";
import { loadModels, modelsFault } from "../api/models.ts";
import { apiKey, isRemembered, setKey } from "../api/server.ts";
import { Dialog } from "./Dialog.tsx";
import { dialog } from "./layout.ts";

export function KeyForm({ onDone }: { onDone?: () => void }): VNode {
  const done = async (event: Event): Promise<void> => {
    event.preventDefault();
    const form = new FormData(event.currentTarget as HTMLFormElement);
    setKey(String(form.get("key") ?? "").trim(), form.get("remember") !== null);
    await loadModels();
    if (modelsFault.value === null) onDone?.();
  };
  return (
    <form class="key" onSubmit={(event) => void done(event)}>
      <label>
        API key of this server
        <input name="key" type="password" autocomplete="off" defaultValue={apiKey.value} />
      </label>
      <label class="check">
        <input name="remember" type="checkbox" defaultChecked={isRemembered()} /> Remember it in this browser
      </label>
      {modelsFault.value && (
        <p class="fault" role="alert">
          {modelsFault.value.message}
        </p>
      )}
      <div class="buttons start">
        <button class="primary">Use this key</button>
      </div>
    </form>
  );
}

export function KeyDialog(): VNode {
  return (
    <Dialog title="API key">
      <KeyForm onDone={() => (dialog.value = null)} />
    </Dialog>
  );
}
