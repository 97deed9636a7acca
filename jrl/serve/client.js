// Client of a jrl server for pages and Node: plays episodes with the policy of `python -m jrl.serve CONFIG`. Needs only
// this file. The calls are those of client.py. The server must list a page's origin in external.origins.
//
//     const client = new PolicyClient("http://127.0.0.1:9900");
//     const episode = await client.startEpisode();
//     let observation = env.reset();
//     for (let over = false; !over; ) {
//       const step = env.step(await client.getAction(episode, observation));
//       client.logReturns(episode, step.reward);
//       observation = step.observation;
//       over = step.terminated || step.truncated;
//       if (over) await client.endEpisode(episode, observation, step.truncated);
//     }
//
// While the server is not reachable, calls wait and try again; a repeated request counts once. After a restart of the
// server without the episode, calls throw EpisodeLost: begin another. For a page, a refused origin looks like a server
// that is not reachable; the browser's console shows the reason.

const FIRST_MS = 100; // between tries, doubled each time
const LONGEST_MS = 5000;

/** The server refused a request. `status` is the HTTP status, 4xx. */
export class RequestRefused extends Error {
  constructor(status, message) {
    super(message);
    this.name = "RequestRefused";
    this.status = status;
  }
}

/** The server does not have the episode any more, after a restart or a long silence: begin another. */
export class EpisodeLost extends Error {
  constructor(message) {
    super(message);
    this.name = "EpisodeLost";
  }
}

/** The server did not answer. */
export class ServerAway extends Error {
  constructor(message) {
    super(message);
    this.name = "ServerAway";
  }
}

/**
 * Connection to a server, and its episodes.
 *
 * @param address http://HOST:PORT, or https.
 * @param token the server's token; null: the server needs none.
 * @param timeoutMs time for a request.
 * @param patienceMs time of trying again while the server is not reachable; then calls throw ServerAway.
 */
export class PolicyClient {
  #address;
  #headers;
  #timeoutMs;
  #patienceMs;
  #episodes = new Map(); // by id: reward and infos since the latest request, and the number of the step

  constructor(address = "http://127.0.0.1:9900", { token = null, timeoutMs = 60_000, patienceMs = 300_000 } = {}) {
    this.#address = address.replace(/\/+$/, "");
    this.#headers = { "Content-Type": "application/json", "Jrl-Client": newId() };
    if (token !== null) this.#headers.Authorization = `Bearer ${token}`;
    this.#timeoutMs = timeoutMs;
    this.#patienceMs = patienceMs;
    this.version = 0; // of the weights that chose the latest action
  }

  /** Begins an episode; returns its id. The server learns from it if `trainingEnabled`; `policy`: name of the policy. */
  async startEpisode({ episodeId = null, trainingEnabled = true, policy = null } = {}) {
    const id = episodeId ?? newId();
    const fields = { episode_id: id, training_enabled: trainingEnabled };
    try {
      await this.#request("POST", "/v1/episodes", policy === null ? fields : { ...fields, policy });
    } catch (error) {
      // a new id is refused only if the answer to the first try was lost
      if (!(error instanceof RequestRefused && error.status === 409 && episodeId === null)) throw error;
    }
    this.#episodes.set(id, { reward: 0, step: 0, infos: {} });
    return id;
  }

  /** Returns the policy's action at an observation, in the environment's units. */
  async getAction(episodeId, observation) {
    const found = await this.#of(episodeId, "action", { observation });
    this.version = found.version;
    return found.action;
  }

  /**
   * Reports an action that the caller chose. Throws RequestRefused if the algorithm learns only from its own actions.
   * `logProb`: log-probability of the action, if known; algorithms that learn from any action ignore it.
   */
  async logAction(episodeId, observation, action, logProb = null) {
    const known = logProb === null ? {} : { log_prob: logProb };
    await this.#of(episodeId, "log", { observation, action, ...known });
  }

  /**
   * Adds to the reward of the latest action; sent with the next request. `info`: numbers by name, whose means are in the
   * server's result rows. Throws TypeError for an info that is not a finite number.
   */
  logReturns(episodeId, reward, info = null) {
    const episode = this.#episode(episodeId);
    for (const [name, x] of Object.entries(info ?? {})) {
      if (typeof x !== "boolean" && !Number.isFinite(x)) throw new TypeError(`info/${name}: expected a finite number`);
    }
    episode.reward += reward;
    Object.assign(episode.infos, info);
  }

  /** Ends an episode with the observation after its last action; returns its `return` and `length`. */
  async endEpisode(episodeId, observation, truncated = false) {
    const found = await this.#of(episodeId, "end", { observation, truncated });
    this.#episodes.delete(episodeId);
    return found;
  }

  /** Begins `count` episodes, for `steps`; returns their ids. */
  async startEpisodes(count, { trainingEnabled = true, policy = null } = {}) {
    const fields = { count, training_enabled: trainingEnabled };
    return (await this.#request("POST", "/v1/episodes", policy === null ? fields : { ...fields, policy })).episode_ids;
  }

  /**
   * Steps N episodes: sends the results of the latest actions, and returns the next `{episodes, actions}`.
   *
   * @param episodes N ids.
   * @param observations [N] current observations; for an ended episode, the first of the next episode.
   * @param rewards [N] rewards of the latest actions; left out before the first action.
   * @param terminated, truncated [N], episodes that ended with the latest action.
   * @param finalObservations [N] last observations of ended episodes; other rows are ignored.
   * Throws EpisodeLost if no answer arrived, so that it is unknown whether the step counts.
   */
  async steps(episodes, observations, { rewards, terminated, truncated, finalObservations } = {}) {
    const fields = { episode_ids: episodes, observations, rewards, terminated, truncated };
    let found;
    try {
      const whole = { ...fields, final_observations: finalObservations };
      found = await this.#request("POST", "/v1/steps", whole, { again: false });
    } catch (error) {
      throw lost(error) ? new EpisodeLost(error.message) : error;
    }
    this.version = found.version;
    return { episodes: found.episode_ids, actions: found.actions };
  }

  /** Returns the server's policies by name: algorithm, spaces, version. */
  async policies() {
    return (await this.#request("GET", "/v1/policies")).policies;
  }

  #episode(id) {
    const found = this.#episodes.get(id);
    if (found === undefined) throw new EpisodeLost(`${id}: there is no such episode: begin one`);
    return found;
  }

  async #of(id, what, fields) {
    const episode = this.#episode(id);
    const { reward: told, infos } = episode;
    episode.infos = {};
    const more = Object.keys(infos).length ? { infos } : {};
    try {
      const path = `/v1/episodes/${encodeURIComponent(id)}/${what}`;
      const found = await this.#request("POST", path, { ...fields, ...more, reward: told, step: episode.step });
      episode.reward -= told;
      episode.step += 1;
      return found;
    } catch (error) {
      if (!(error instanceof RequestRefused)) episode.infos = { ...infos, ...episode.infos }; // nobody has read them
      if (!(error instanceof RequestRefused) || !lost(error)) throw error;
      this.#episodes.delete(id);
      throw new EpisodeLost(error.message);
    }
  }

  async #request(method, path, fields, { again = true } = {}) {
    const until = performance.now() + this.#patienceMs;
    const body = fields === undefined ? undefined : JSON.stringify(fields, plain);
    for (let wait = FIRST_MS; ; wait = Math.min(2 * wait, LONGEST_MS)) {
      try {
        const signal = AbortSignal.timeout(this.#timeoutMs);
        const answer = await fetch(this.#address + path, { method, body, headers: this.#headers, signal });
        const found = await answer.json();
        if (answer.ok) return found;
        const refused = new RequestRefused(answer.status, found.error ?? `status ${answer.status}`);
        if (answer.status !== 429 || !again || performance.now() + wait > until) throw refused;
      } catch (error) {
        if (error instanceof RequestRefused) throw error;
        if (!again || performance.now() + wait > until) throw new ServerAway(`${this.#address}: ${error.message}`);
      }
      await new Promise((resolve) => setTimeout(resolve, wait * (0.5 + Math.random() / 2)));
    }
  }
}

function lost(error) {
  return error instanceof ServerAway || (error instanceof RequestRefused && [404, 410].includes(error.status));
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function plain(_, value) {
  return ArrayBuffer.isView(value) ? Array.from(value, Number) : value;
}
