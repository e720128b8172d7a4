#!/usr/bin/env bash
# The wire contract's tools: `write` regenerates the stubs, `check` lints the protos, compares the stubs with the protos
# and looks for changes that break the contract of an earlier commit.
set -euo pipefail
cd "$(dirname "$0")/.."

# The oldest generator that works: generated code refuses a protobuf runtime older than itself, so these versions set the
# oldest protobuf that the package runs with. They do not fit beside vLLM, hence an environment of their own.
make_environment() {
    local stamp=.venv-proto/.made
    [ "$stamp" -nt scripts/proto.sh ] && return
    [ -x .venv-proto/bin/python ] || "${PYTHON:-python3}" -m venv .venv-proto
    .venv-proto/bin/python -m pip install -q \
        mypy-protobuf==5.1.0 types-grpcio==1.85.0.20261028 grpcio==1.85.3 buf-bin==1.75.0 protobuf==7.36.2 "setuptools<80"
    .venv-proto/bin/python -m pip install -q --no-deps grpcio-tools==1.71.2
    touch "$stamp"
}

generate() {  # generate FOLDER
    PATH="$PWD/.venv-proto/bin:$PATH" .venv-proto/bin/python -m grpc_tools.protoc -Iproto \
        --python_out="$1" --grpc_python_out="$1" --mypy_out="$1" --mypy_grpc_out="$1" proto/headrace/v1/*.proto
}

compare() {
    local fresh
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' RETURN
    generate "$fresh" 2>/dev/null
    # __init__.py is written by hand.
    if ! diff -r -x __init__.py -x __pycache__ "$fresh/headrace/v1" src/headrace/v1; then
        echo "error: src/headrace/v1 is not what proto/headrace/v1 generates; run 'make proto' and commit both" >&2
        return 1
    fi
}

# The commit to compare the contract with: PROTO_BASE, else the last release, else main, else (on main) the one before.
# A later commit whose message has a line "Breaks-contract: REASON" takes its place: from there on nothing may break.
base_commit() {
    local base marked
    base=$(earlier_commit)
    [ -n "$base" ] || return 0
    marked=$(git log -1 --format=%H --grep='^Breaks-contract: .' "$base"..HEAD)
    echo "${marked:-$base}"
}

earlier_commit() {
    local base
    if [ -n "${PROTO_BASE:-}" ]; then
        echo "$PROTO_BASE"
        return
    fi
    if git describe --tags --abbrev=0 --match 'v*' 2>/dev/null; then
        return
    fi
    for base in origin/main main HEAD~1; do
        base=$(git rev-parse -q --verify "$base^{commit}" 2>/dev/null) || continue
        if [ "$base" != "$(git rev-parse HEAD)" ] || ! git diff --quiet HEAD -- proto; then
            echo "$base"
            return
        fi
    done
}

breaking() {
    local base old
    base=$(base_commit)
    if [ -z "$base" ] || ! git cat-file -e "$base:proto/headrace/v1" 2>/dev/null; then
        echo "proto: no earlier commit with a contract to compare with"
        return
    fi
    old=$(mktemp -d)
    trap 'rm -rf "$old"' RETURN
    git archive "$base" proto | tar -x -C "$old"
    .venv-proto/bin/buf breaking proto --against "$old/proto"
    echo "proto: nothing breaks the contract of ${base:0:12}"
}

make_environment
case ${1:-} in
    write)
        generate src
        ;;
    check)
        .venv-proto/bin/buf lint proto
        compare
        breaking
        ;;
    *)
        echo "usage: scripts/proto.sh write|check" >&2
        exit 2
        ;;
esac
