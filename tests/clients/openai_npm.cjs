// What the npm package `openai` does with each feature: a line of JSON for each, {"feature", "ok", "error"}.
// Given: the base URL and the key.
const OpenAI = require("openai");

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 60_000 });
const model = "smollm2";
const messages = [{ role: "user", content: "What is the capital of France? Answer in one word." }];
const schema = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, unit: { enum: ["celsius", "fahrenheit"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "weather", parameters: schema, strict: true } };
const once = { model, messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_tokens: 60 };

function must(condition, what) {
  if (!condition) throw new Error(`not so: ${what}`);
}

function fits(text) {
  const value = JSON.parse(text);
  must(schema.properties.city.enum.includes(value.city), text);
  must(schema.properties.unit.enum.includes(value.unit), text);
}

async function refusal(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  throw new Error("nothing was refused");
}

const features = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 16 });
    must(answer.choices[0].message.content.includes("Paris"), JSON.stringify(answer));
  },
  async stream() {
    const options = { include_usage: true };
    const request = { model, messages, temperature: 0, max_tokens: 16, stream: true, stream_options: options };
    let text = "";
    let usage = null;
    for await (const event of await client.chat.completions.create(request)) {
      text += event.choices[0]?.delta.content ?? "";
      usage = event.usage ?? usage;
    }
    must(text.includes("Paris") && usage.completion_tokens > 0, text);
  },
  async tools() {
    const answer = await client.chat.completions.create(once);
    must(answer.choices[0].message.tool_calls.length === 1, "one call");
    fits(answer.choices[0].message.tool_calls[0].function.arguments);
  },
  async runner() {
    // The client calls the function itself and sends its result back.
    let called = 0;
    const weather = { ...tool.function, parse: JSON.parse, function: () => ((called += 1), "18 degrees") };
    const tools = [{ type: "function", function: weather }];
    const choice = { type: "function", function: { name: "weather" } };
    const runner = client.chat.completions.runTools({ model, messages, tools, tool_choice: choice, max_tokens: 60 });
    await runner.done();
    must(called >= 1, "the function was called");
  },
  async schema() {
    const response_format = { type: "json_schema", json_schema: { name: "weather", strict: true, schema } };
    const answer = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 60 });
    fits(answer.choices[0].message.content);
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model, input: ["a cat", "a dog"] });
    must(answer.data.length === 2 && answer.data[0].embedding.length > 100, "two vectors");
    must(Math.abs(Math.hypot(...answer.data[0].embedding) - 1) < 1e-3, "of length 1");
  },
  async responses() {
    const request = { model, input: messages[0].content, temperature: 0, max_output_tokens: 16 };
    const answer = await client.responses.create(request);
    must(answer.output_text.includes("Paris"), answer.output_text);
    let text = "";
    for await (const event of await client.responses.create({ ...request, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    must(text === answer.output_text, text);
  },
  async errors() {
    const content = "word ".repeat(4096);
    const long = await refusal(client.chat.completions.create({ model, messages: [{ role: "user", content }] }));
    must(long instanceof OpenAI.BadRequestError && long.code === "context_length_exceeded", long);
    const wrong = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
    must((await refusal(wrong.models.list())) instanceof OpenAI.AuthenticationError, "401");
    const unknown = client.chat.completions.create({ model: "no-such-model", messages });
    must((await refusal(unknown)) instanceof OpenAI.NotFoundError, "404");
  },
  async cancel() {
    const request = { model, prompt: "Once", max_tokens: 1500, stream: true, ignore_eos: true };
    for await (const _ of await client.completions.create(request)) break; // leaving the loop closes the connection
  },
};

async function main() {
  for (const [feature, run] of Object.entries(features)) {
    let error = null;
    try {
      await run();
    } catch (thrown) {
      error = String(thrown?.stack ?? thrown);
    }
    console.log(JSON.stringify({ feature, ok: error === null, error }));
  }
}

main();
