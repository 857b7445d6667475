// A page that is opened from disk may not start a worker, and the search is one. Here the worker's script runs in a
// hidden frame instead. Loaded before the theme's own scripts.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.heard = (event) => {
        if (event.source === this.frame.contentWindow)
          this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      }
      this.isReady = new Promise((ready) => { this.frame.onload = ready })
      this.frame.srcdoc = `<script>
        postMessage = (data) => parent.postMessage(data, "*")
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          document.head.append(Object.assign(document.createElement("script"), { src: url, onload: done, onerror: failed }))
        })), Promise.resolve())
      </script><script src="${url}"></script>`
      window.addEventListener("message", this.heard)
      document.body.append(this.frame)
    }
    postMessage(data) {
      this.isReady.then(() => {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
      })
    }
    terminate() {
      window.removeEventListener("message", this.heard)
      this.frame.remove()
    }
  }
}
