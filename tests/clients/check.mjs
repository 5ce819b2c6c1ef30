// Runs the official OpenAI client for Node.js against a gateway: node check.mjs MODULES BASE_URL MODEL.
// MODULES is the folder that holds node_modules. Prints a line for each check and ends with an error at the first answer that
// the client, or this script, does not accept.
import { createRequire } from "node:module";
import path from "node:path";

const [modules, baseURL, model] = process.argv.slice(2);
const require = createRequire(path.resolve(modules, "package.json"));
const OpenAI = require("openai").default;

const client = new OpenAI({ baseURL, apiKey: "test-key", maxRetries: 0, timeout: 30_000 });
const messages = [
  { role: "system", content: "You answer briefly." },
  { role: "user", content: "Name a lake, and say how deep it is." },
];
const tools = [
  {
    type: "function",
    function: {
      name: "lake_depth",
      description: "The depth of a lake in metres.",
      parameters: { type: "object", properties: { lake: { type: "string" } }, required: ["lake"] },
    },
  },
];

function check(name, good, seen) {
  if (!good) {
    console.error(`FAILED ${name}: ${JSON.stringify(seen)}`);
    process.exit(1);
  }
  console.log(`ok ${name}`);
}

const listed = [];
for await (const m of client.models.list()) listed.push(m.id);
check("models.list", listed.includes(model) && new Set(listed).size === listed.length, listed);

const answer = await client.chat.completions.create({ model, messages, max_tokens: 12 });
check("chat", answer.choices[0].message.content?.length > 0, answer);
check("chat usage", answer.usage.prompt_tokens > 0, answer.usage);

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 12,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
check("chat stream", text === answer.choices[0].message.content, text);
check("chat stream usage", usage?.prompt_tokens === answer.usage.prompt_tokens, usage);

const called = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 64 });
const call = called.choices[0].message.tool_calls?.[0];
check("tools", call?.function.name === "lake_depth" && typeof JSON.parse(call.function.arguments) === "object", called);

const runner = client.chat.completions.stream({ model, messages, tools, tool_choice: "required", max_tokens: 64 });
const final = await runner.finalChatCompletion();
check("tools stream", final.choices[0].message.tool_calls?.[0]?.function.name === "lake_depth", final);

const done = await client.completions.create({ model, prompt: "Lakes lie", max_tokens: 8 });
check("completions", done.choices[0].text.length > 0, done);
let parts = "";
for await (const chunk of await client.completions.create({ model, prompt: "Lakes lie", max_tokens: 8, stream: true })) {
  parts += chunk.choices[0]?.text ?? "";
}
check("completions stream", parts === done.choices[0].text, parts);

// A client that leaves in mid-stream must be able to ask again at once.
const left = await client.chat.completions.create({ model, messages, max_tokens: 200, stream: true });
for await (const chunk of left) {
  if (chunk.choices[0]?.delta?.content) break;
}
const again = await client.chat.completions.create({ model, messages, max_tokens: 4 });
check("after leaving", again.choices.length === 1, again);

try {
  await client.chat.completions.create({ model: "no-such-model", messages });
  check("unknown model", false, "no error");
} catch (error) {
  check("unknown model", error instanceof OpenAI.NotFoundError, String(error));
}
