// The status page.

import { render } from "preact";
import { showTheme } from "./state/settings.ts";
import { start } from "./status/feed.ts";
import { StatusPage } from "./status/StatusPage.tsx";

showTheme();
render(<StatusPage />, document.getElementById("page") as HTMLElement);
start();
