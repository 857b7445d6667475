// Server-sent events of a POST request, which EventSource does not support.

export class Refused extends Error {
  constructor(status, error, waitS) {
    super(inWords(error) || `The service answered with status ${status}.`);
    this.status = status;
    this.waitS = waitS;
  }
}

// The connection failed or was lost.
export class Gone extends Error {}

const reaching = (promise, signal) =>
  promise.catch((error) => {
    throw signal.aborted ? error : new Gone(String(error));
  });

const MEANINGS = {
  context_length_exceeded: "This is too long for the model",
  deadline_exceeded: "It took too long",
  engine_dead: "The engine has died",
};

// Returns the message for an error in OpenAI's form.
export function inWords(error) {
  const meaning = Object.hasOwn(MEANINGS, error?.code ?? "") ? `${MEANINGS[error.code]}: ` : "";
  const message = String(error?.message ?? "");
  const words = meaning + message;
  return words && words[0].toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
}

const headersOf = (key) => ({
  "content-type": "application/json",
  ...(key ? { authorization: `Bearer ${key}` } : {}),
});

// Returns the JSON of a response, or null if it is empty. Throws Refused, or Gone without a connection.
export async function call(method, path, body, key) {
  const sent = { method, headers: headersOf(key), body: body && JSON.stringify(body), cache: "no-store" };
  const answer = await reaching(fetch(path, sent), {});
  if (!answer.ok) throw await refusal(answer);
  return answer.status === 204 ? null : reaching(answer.json(), {});
}

// Yields each event as {name, values}. Throws Refused for a response that is not a stream, Gone if the connection is
// lost, and AbortError if `signal` is aborted.
export async function* ask(body, key, signal) {
  const headers = { ...headersOf(key), accept: "text/event-stream" };
  const sent = { method: "POST", headers, body: JSON.stringify(body), signal, cache: "no-store" };
  const answer = await reaching(fetch("v1/ask", sent), signal);
  if (!answer.ok) throw await refusal(answer);
  yield* events(answer.body, signal);
}

async function refusal(answer) {
  let error = null;
  try {
    error = (await answer.json()).error;
  } catch {
    // the response comes from a proxy, not from the service
  }
  const waitS = Number.parseInt(answer.headers.get("retry-after") ?? "", 10);
  return new Refused(answer.status, error, Number.isFinite(waitS) ? Math.max(waitS, 1) : null);
}

async function* events(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reaching(reader.read(), signal);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const whole of lines) {
        const line = whole.endsWith("\r") ? whole.slice(0, -1) : whole;
        if (line === "") {
          if (data.length) yield { name: name || "message", values: JSON.parse(data.join("\n")) };
          name = "";
          data = [];
        } else if (line.startsWith("event:")) {
          name = line.slice(6).trim();
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // already aborted or at its end
  }
}
