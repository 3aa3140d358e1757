// Server-sent events of a fetch response.

/** The data of each event of a byte stream. Comments and other fields are skipped; the stream is let go at the end. */
export async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return; // an event without its empty line is no event
      const lines = (buffer + value).split("\n");
      buffer = lines.pop();
      for (const ended of lines) {
        const line = ended.endsWith("\r") ? ended.slice(0, -1) : ended;
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone already
  }
}
