#!/usr/bin/env bash
# Print an interpreter of this version of Python: scripts/find_python.sh 3.12
# A name on the path may be pyenv's, which answers only where that version has been chosen, so each
# candidate is started.
version=${1:?usage: find_python.sh VERSION, such as 3.12}
for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/"python$version" \
  "$(uv python find "$version" 2>/dev/null)"; do
  "$python" -c 'import ensurepip, sys; print(sys.executable)' 2>/dev/null && exit
done
echo "Python $version is not here: install python$version and its venv module" >&2
exit 1
