// Server-sent events of a POST: EventSource can only GET.

export class Refused extends Error {
  constructor(status, error, waitS) {
    super(inWords(error) || `The service answered with status ${status}.`);
    this.status = status;
    this.waitS = waitS;
  }
}

// The connection broke, or there was none.
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

// An error of the service, in OpenAI's form, for a person.
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

// What the service answers, as JSON; null if it says nothing. Throws Refused, or Gone when there is no connection.
export async function call(method, path, body, key) {
  const sent = { method, headers: headersOf(key), body: body && JSON.stringify(body), cache: "no-store" };
  const answer = await reaching(fetch(path, sent), {});
  if (!answer.ok) throw await refusal(answer);
  return answer.status === 204 ? null : reaching(answer.json(), {});
}

// Each event as {name, values}, until the stream ends. Throws Refused for an answer that is not a stream, Gone when the
// connection breaks, AbortError when `signal` says so.
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
    // something on the way here has answered, not the service
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
    reader.cancel().catch(() => {}); // it was aborted, or is at its end
  }
}
