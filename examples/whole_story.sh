#!/usr/bin/env bash
# The whole story on a folder of your own text, a minute or two on two cores, with .venv active:
# tokenizer, training, going on, writing, packing, counting.
#   examples/whole_story.sh TEXT_FOLDER [RUN]
set -euo pipefail
text=${1:?usage: whole_story.sh TEXT_FOLDER [RUN]}
run=${2:-runs/whole-story}
steps=${STEPS:-200}

openk3 tokenizer train --text "$text" --out "$run-tokenizer" --vocab-size 1024
openk3 tokenizer encode "import torch" --tokenizer "$run-tokenizer"

openk3 pretrain tiny --data "$text" --data.tokenizer "$run-tokenizer" --out "$run" --steps "$steps" --seed 1
openk3 pretrain --resume "$run" --steps $((steps * 5 / 4))

openk3 generate "$run" --prompt "def " --max-tokens 60 --seed 1
openk3 chat "$run" --message "What is this module for?" --max-tokens 60

openk3 convert "$run" "$run-mxfp4" --experts mxfp4
openk3 plan "$run-mxfp4"
