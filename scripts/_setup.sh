# Shared by all scripts here: goes to the repository root and makes `.venv` fit for the work.
# Sourced, never run. Needs nothing but bash and a Python; knows nothing of what the script then does.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

make_venv() {
    if [[ -e .venv ]]; then
        is_new_enough .venv/bin/python && return
        echo "error: .venv has no working Python >= 3.11. Remove the folder and run this again." >&2
        exit 1
    fi
    local python
    for python in python3.11 python3; do
        if is_new_enough "$python"; then
            echo "making .venv with $("$python" --version)" >&2
            "$python" -m venv .venv
            return
        fi
    done
    echo "error: neither python3.11 nor python3 is a Python >= 3.11. Install one and run this again." >&2
    exit 1
}

# pip prints one "Location ... is ignored" line per package for index folders that aren't there.
quiet_pip() {
    .venv/bin/python -m pip install --quiet -c constraints.txt "$@" \
        2> >(grep -v 'Location .* is ignored' >&2 || true)
}

# install EXTRA...: the editable package with these extras, unless the stamp says that it is done.
# The stamp holds a hash of what is asked for, then the extras that are in; a wider set serves a narrower one.
install() {
    make_venv
    local stamp=.venv/elastane-stamp now was="" have="" extra missing=()
    now=$(cat pyproject.toml constraints.txt | .venv/bin/python -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
    if [[ -f $stamp ]]; then
        { read -r was && read -r have; } <"$stamp" || true
    fi
    [[ $was == "$now" ]] || have=""
    for extra in "$@"; do
        [[ " $have " == *" $extra "* ]] || missing+=("$extra")
    done
    [[ -n $have && ${#missing[@]} -eq 0 ]] && return
    local all
    all=$(printf '%s\n' $have "$@" | sort -u | paste -sd ' ' -)
    echo "installing elastane[${all// /,}] into .venv" >&2
    rm -f "$stamp"
    quiet_pip hatchling editables  # the build backend, pinned too: hence no build isolation
    quiet_pip --no-build-isolation -e ".[${all// /,}]"
    printf '%s\n%s\n' "$now" "$all" >"$stamp"
}
