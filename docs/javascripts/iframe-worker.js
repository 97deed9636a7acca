// Browsers refuse web workers on pages of the file system. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html>";
      this.ready = new Promise((resolve) => (this.frame.onload = resolve)).then(() => this.start(url));
      document.body.append(this.frame);
    }

    start(url) {
      const inner = this.frame.contentWindow;
      const load = (address) =>
        new Promise((resolve, reject) => {
          const script = inner.document.createElement("script");
          script.src = address;
          script.onload = resolve;
          script.onerror = reject;
          inner.document.head.append(script);
        });
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...addresses) =>
        addresses.reduce((last, address) => last.then(() => load(address)), Promise.resolve());
      return load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
