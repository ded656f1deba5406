import { render } from "preact";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { App } from "./App";
import { embedded, served } from "./data";

const target = document.getElementById("app")!;
const source = document.getElementById("summary") ? embedded : served;

source
  .summary()
  .then((summary) => {
    if (!summary.runs.length) throw new Error("There is no run to show.");
    target.replaceChildren();
    render(<App first={summary} source={source} />, target);
  })
  .catch((problem: Error) => {
    const text = document.createElement("p");
    text.className = "banner";
    text.textContent = `This page cannot be shown: ${problem.message}`;
    target.replaceChildren(text);
  });
