// The chat page.

import { render } from "preact";
import { loadModels } from "./api/models.ts";
import { start } from "./state/conversations.ts";
import { showTheme } from "./state/settings.ts";
import { App } from "./view/App.tsx";
import { onKeyDown } from "./view/shortcuts.ts";

showTheme();
render(<App />, document.getElementById("page") as HTMLElement);
addEventListener("keydown", onKeyDown);
void start();
void loadModels();
