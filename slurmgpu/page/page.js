"use strict";
const choice = document.getElementById("task");
if (choice) {
  choice.disabled = false;
  const show = () => {
    for (const line of document.querySelectorAll("svg .task")) {
      line.classList.toggle("shown", line.classList.contains(choice.value));
    }
  };
  choice.addEventListener("change", show);
  show();
}
for (const mark of document.querySelectorAll("pre mark")) {
  const box = mark.closest("pre");
  const show = () => {
    const line = parseFloat(getComputedStyle(box).lineHeight);
    const above = mark.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientTop + box.scrollTop;
    const lines = Math.round((above - (box.clientHeight - mark.getBoundingClientRect().height) / 2) / line);
    box.scrollTop = line * Math.max(0, lines);
  };
  mark.closest("details").addEventListener("toggle", show, { once: true });
  show();
}
const copy = document.getElementById("copy");
if (copy) {
  copy.hidden = false;
  copy.addEventListener("click", () => {
    const range = document.createRange();
    range.selectNodeContents(document.getElementById("command"));
    const selection = window.getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    // A file: has no navigator.clipboard in every browser; the older way works there, too.
    if (document.execCommand("copy")) {
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 2000);
    }
  });
}
window.addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
