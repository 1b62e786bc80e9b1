// A server for work on the pages: it builds them at each load and hands everything else to a running Hearth.
//
//   node serve.mjs [http://127.0.0.1:8000] [5173]

import { createServer, request } from "node:http";
import { files } from "./build.mjs";

const behind = new URL(process.argv[2] ?? "http://127.0.0.1:8000");
const port = Number(process.argv[3] ?? 5173);

createServer(async (asked, answer) => {
  const path = asked.url.split("?")[0];
  const name = path === "/" ? "index" : path === "/status" ? "status" : null;
  if (name && asked.method === "GET") {
    try {
      const made = await files({ minify: false });
      answer.writeHead(200, { "content-type": "text/html; charset=utf-8", "content-security-policy": made[`${name}.csp`].trim() });
      answer.end(made[`${name}.html`]);
    } catch (fault) {
      answer.writeHead(500, { "content-type": "text/plain" });
      answer.end(String(fault));
    }
    return;
  }
  const passed = request(
    { host: behind.hostname, port: behind.port, path: asked.url, method: asked.method, headers: { ...asked.headers, host: behind.host } },
    (response) => {
      answer.writeHead(response.statusCode, response.headers);
      response.pipe(answer);
    },
  );
  passed.on("error", () => answer.destroy());
  answer.on("close", () => passed.destroy());
  asked.pipe(passed);
}).listen(port, "127.0.0.1", () => console.log(`http://127.0.0.1:${port} in front of ${behind.origin}`));
