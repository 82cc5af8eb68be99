// OpenAI's client for Node against a server: `node openai_node.mjs URL SCENARIO ASKS`.
//
// MINIINFER_NODE is the folder with the client; ASKS is JSON: messages, tools, tool_choice, form.
// Prints what the scenario found as one line of JSON. Judging it is the caller's job.

import { createRequire } from "node:module";
import { join } from "node:path";

const require = createRequire(join(process.env.MINIINFER_NODE, "package.json"));
const { OpenAI, BadRequestError, NotFoundError } = require("openai");

const [url, scenario, asksJson] = process.argv.slice(2);
const asks = JSON.parse(asksJson);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const chat = { model: "tiny", messages: asks.messages, temperature: 0, max_tokens: 200 };

/** Ask for the whole answer and for a stream that the client's helper adds up. */
async function both(fields) {
  const whole = await client.chat.completions.create({ ...chat, ...fields });
  const runner = client.chat.completions.stream({ ...chat, ...fields });
  const streamed = await runner.finalChatCompletion();
  return [whole.choices[0], streamed.choices[0]];
}

const scenarios = {
  async text() {
    const fields = { ...chat, max_tokens: 12, ignore_eos: true };
    const whole = await client.chat.completions.create(fields);
    const stream = await client.chat.completions.create({
      ...fields,
      stream: true,
      stream_options: { include_usage: true },
    });
    const chunks = [];
    for await (const chunk of stream) {
      chunks.push(chunk);
    }
    return { whole, chunks };
  },

  async tools() {
    return await both({ tools: asks.tools, tool_choice: asks.tool_choice });
  },

  async form() {
    return await both({ response_format: asks.form });
  },

  async abort() {
    const stream = await client.chat.completions.create({
      ...chat,
      ignore_eos: true,
      stream: true,
    });
    let pieces = 0;
    for await (const chunk of stream) {
      if (chunk.choices[0].delta.content) {
        pieces += 1;
        // Ends the loop, and the connection with it.
        stream.controller.abort();
      }
    }
    return { pieces };
  },

  async errors() {
    const found = [];
    for (const fields of [{ temperature: -1 }, { stream: true, n: 0 }, { model: "other" }]) {
      try {
        await client.chat.completions.create({ ...chat, ...fields });
      } catch (error) {
        const { status, code, param, type, message } = error;
        const kinds = { BadRequestError, NotFoundError };
        const kind = Object.keys(kinds).find((name) => error instanceof kinds[name]);
        found.push({ kind, status, code, param, type, message });
      }
    }
    return found;
  },
};

console.log(JSON.stringify(await scenarios[scenario]()));
