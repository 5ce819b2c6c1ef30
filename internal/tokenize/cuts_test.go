package tokenize

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"prefixgate/internal/testenv"
)

// Every chunk ends where a cut is proved, and the chunks make up the text.
func TestChunksEndAtProvedPlaces(t *testing.T) {
	rules := &cutRules{newline: true, space: true, cjk: true}
	for _, token := range []string{"<|im_start|>", "<|im_end|>", "[INST]"} {
		rules.special.add(token)
	}
	maker := newTextMaker(t, 21)
	rng := rand.New(rand.NewPCG(21, 21))
	used := map[string]int{}
	for i := range 60 {
		var text string
		switch i % 5 {
		case 0:
			text = conversation(maker, 20_000)
		case 1:
			text = maker.text(20_000)
		case 2:
			text = mixedScripts(rng, 3000)
		case 3:
			text = fuzzText(rng, []string{"[INST]", "<|im_end|>"}, 5000)
		case 4:
			text = strings.Repeat("漢字，仮名。", 500) + strings.Repeat("word ", 1000) + strings.Repeat("9", 9000)
		}
		for start := 0; start < len(text); {
			end, ahead := rules.next(text, start)
			if end <= start || end > len(text) {
				t.Fatalf("text %d: the chunk at %d ends at %d of %d", i, start, end, len(text))
			}
			if end == len(text) {
				break
			}
			want, ok := rules.at(text, end)
			if !ok || want != ahead {
				t.Fatalf("text %d: cut at %d with %d bytes ahead, which at says is %t with %d: %q", i, end, ahead, ok, want, text[end-5:end+5])
			}
			if end-start < minChunk {
				t.Errorf("text %d: a chunk of %d bytes, want at least %d", i, end-start, minChunk)
			}
			switch {
			case rules.special.at(text, end):
				used["special"]++
			case newlineCut(text, end):
				used["newline"]++
			case spaceCut(text, end):
				used["space"]++
			default:
				used["cjk"]++
			}
			start = end
		}
	}
	for _, kind := range allCutKinds {
		if used[string(kind)] == 0 {
			t.Errorf("no chunk ended at a cut of the kind %s", kind)
		}
	}
}

// An entry that spans a place switches its kind off, whole or in parts of characters.
func TestSpans(t *testing.T) {
	for _, c := range []struct {
		entry               string
		newline, space, cjk bool
	}{
		{"hello", false, false, false},
		{" hello", false, false, false},
		{".\n\n", false, false, false},
		{"\nA", true, false, false},
		{"x\nи", true, false, false},
		{"\n\xd0", true, false, false}, // the first byte of a Cyrillic letter
		{"\n1", false, false, false},
		{"of the", false, true, false},
		{"a ", false, true, false},
		{", ", false, true, false},
		{"1 a", false, false, false},
		{") (", false, false, false},
		{"\xb0 a", false, true, false}, // the last byte of some letter
		{"a  b", false, false, false},
		{"的，", false, false, true},
		{"的\xef", false, false, true},
		{"，的", false, false, false},
		{"a，", false, false, false},
		{"\x84。", false, false, true},
	} {
		if newline, space, cjk := spans(c.entry); newline != c.newline || space != c.space || cjk != c.cjk {
			t.Errorf("spans(%q) = %t, %t, %t, want %t, %t, %t", c.entry, newline, space, cjk, c.newline, c.space, c.cjk)
		}
	}
}

func TestSpecialTokensThatMayBeCutBefore(t *testing.T) {
	v := &vocabulary{Normalizer: json.RawMessage(`{"type":"NFC"}`)}
	for _, c := range []struct {
		name  string
		added []addedToken
		want  []string
	}{
		{"usual ones", []addedToken{{Content: "<a>"}, {Content: "[b]"}, {Content: "c"}, {Content: "<d"}}, []string{"<a>", "[b]"}},
		{"one that strips", []addedToken{{Content: "<a>", LStrip: true}, {Content: "<b>", RStrip: true}}, []string{"<b>"}},
		{"one that stands alone", []addedToken{{Content: "<a>", SingleWord: true}}, nil},
		{"one that is normalized", []addedToken{{Content: "<a>", Normalized: true}}, nil},
		{"one that another swallows", []addedToken{{Content: "<a>"}, {Content: "x<a"}, {Content: "<b>"}}, []string{"<b>"}},
		{"one inside another", []addedToken{{Content: "<a>"}, {Content: "<x<a>>"}}, nil},
	} {
		set := specialTokens(v, c.added)
		var got []string
		for token := range set.tokens {
			got = append(got, token)
		}
		slices.Sort(got)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// sentencePiece returns a tokenizer in the way of Llama 2: no pre-tokenizer, a space put before each text, bytes for unknown
// characters. merges go on from single characters.
func sentencePiece(t *testing.T, edit func(tokenizer map[string]any), merges ...string) string {
	t.Helper()
	vocab := map[string]int{"<unk>": 0, "<s>": 1, "</s>": 2}
	for b := range 256 {
		vocab[fmt.Sprintf("<0x%02X>", b)] = len(vocab)
	}
	for _, c := range "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ,.0123456789" {
		vocab[string(c)] = len(vocab)
	}
	for _, merge := range merges {
		vocab[strings.ReplaceAll(merge, " ", "")] = len(vocab)
	}
	special := func(id int, text string) map[string]any {
		return map[string]any{"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}
	}
	tokenizer := map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil,
		"added_tokens": []any{special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")},
		"normalizer": map[string]any{"type": "Sequence", "normalizers": []any{
			map[string]any{"type": "Prepend", "prepend": "▁"},
			map[string]any{"type": "Replace", "pattern": map[string]any{"String": " "}, "content": "▁"},
		}},
		"pre_tokenizer": nil, "post_processor": nil, "decoder": nil,
		"model": map[string]any{
			"type": "BPE", "dropout": nil, "unk_token": "<unk>", "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
			"fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": merges,
		},
	}
	if edit != nil {
		edit(tokenizer)
	}
	data, err := json.Marshal(tokenizer)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), fileTokenizer)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Tokenizers for which a kind of cut is wrong must lose it, and give the ids of the whole all the same.
func TestWrongCutsAreOff(t *testing.T) {
	words := []string{"▁ t", "h e", "▁t he", "▁ a", "o f", "▁ of", "i n"}
	for _, c := range []struct {
		name string
		path string
		on   []cutKind
	}{
		// A space is put before every part, so a text may be cut at special tokens only.
		{"prepended space", sentencePiece(t, nil, words...), []cutKind{cutSpecial}},
		{"no space put before", sentencePiece(t, func(tokenizer map[string]any) {
			tokenizer["normalizer"] = map[string]any{"type": "Replace", "pattern": map[string]any{"String": " "}, "content": "▁"}
		}, words...), []cutKind{cutSpecial, cutNewline, cutSpace, cutCJK}},
		{"an entry of two words", sentencePiece(t, func(tokenizer map[string]any) {
			tokenizer["normalizer"] = map[string]any{"type": "Replace", "pattern": map[string]any{"String": " "}, "content": "▁"}
		}, append(words, "▁of ▁the")...), []cutKind{cutSpecial, cutNewline, cutCJK}},
		{"metaspace before the first word", sentencePiece(t, func(tokenizer map[string]any) {
			tokenizer["normalizer"] = nil
			tokenizer["pre_tokenizer"] = map[string]any{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false}
		}, words...), []cutKind{cutSpecial, cutSpace}}, // nothing is put before a part that has its space
		{"spaces stripped", sentencePiece(t, func(tokenizer map[string]any) {
			tokenizer["normalizer"] = map[string]any{"type": "Sequence", "normalizers": []any{
				map[string]any{"type": "Strip", "strip_left": true, "strip_right": true},
				map[string]any{"type": "Replace", "pattern": map[string]any{"String": " "}, "content": "▁"},
			}}
		}, words...), nil},
		{"unknown characters fused", sentencePiece(t, func(tokenizer map[string]any) {
			tokenizer["model"].(map[string]any)["byte_fallback"] = false
		}, words...), []cutKind{cutSpecial}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := load(t, Options{Model: c.path, Timeout: time.Minute})
			if c.on != nil && !slices.Equal(m.cutKinds, c.on) {
				t.Errorf("kinds of cuts = %v, want %v", m.cutKinds, c.on)
			}
			data, err := os.ReadFile(c.path)
			if err != nil {
				t.Fatal(err)
			}
			reference, err := newHuggingFace(data, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer reference.close()
			rng := rand.New(rand.NewPCG(31, 31))
			maker := newTextMaker(t, 31)
			for i := range 60 {
				text := fuzzText(rng, []string{"<s>", "</s>", " of the "}, 300)
				if i%2 == 0 {
					text = maker.text(6000)
				}
				want, err := reference.encode(nil, text, false)
				if err != nil {
					t.Fatal(err)
				}
				got, err := m.encodeText(t.Context(), nil, text, false, 0)
				if err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(got, want) {
					t.Fatalf("text %d has other ids than HuggingFace's, from %d on", i, firstDifference(got, want))
				}
			}
		})
	}
}

// Truncation and padding that tokenizer.json asks for are not what the engine does.
func TestTruncationOfTheFileIsIgnored(t *testing.T) {
	m := load(t, Options{Model: testenv.GoModuleTokenizer(t, "all-minilm-l6-v2.json"), Timeout: time.Minute})
	for _, n := range []int{1, 5000} {
		ids, err := m.encodeText(t.Context(), nil, strings.Repeat("word ", n), true, 0)
		if err != nil || len(ids) != n+2 {
			t.Errorf("%d words = %d ids, %v, want %d", n, len(ids), err, n+2)
		}
	}
}

// A chunk whose end does not encode as proved is not used: the whole text is encoded instead, and counted.
func TestMismatchFallsBackToTheWhole(t *testing.T) {
	e := &contextual{}
	p := newPool(e, 1, testGauge())
	defer p.close()
	metrics := newMetrics(nil, "m")
	c := newChunker(p, &cutRules{newline: true}, 1<<20, metrics)
	text := strings.Repeat("line\n", 2000)
	got, err := c.encode(t.Context(), nil, text, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	var counts [1]uintptr
	want, err := e.encodeSpans(nil, text, []span{{0, uintptr(len(text))}}, false, counts[:])
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("encode = %d ids, want those of the whole, %d, %v", len(got), len(want), err)
	}
	if _, err := encodeChunk(e, "line\nli", 2); !errors.Is(err, errCutDiffers) {
		t.Errorf("encodeChunk of such a text = %v, want %v", err, errCutDiffers)
	}
}

// contextual is an encoder in which every id depends on all before it, so that no cut is right.
type contextual struct{}

func (contextual) encodeSpans(dst []uint32, text string, spans []span, _ bool, counts []uintptr) ([]uint32, error) {
	for i, s := range spans {
		sum := uint32(0)
		for _, b := range []byte(text[s.start:s.end]) {
			sum = sum*31 + uint32(b)
			dst = append(dst, sum)
		}
		counts[i] = s.end - s.start
	}
	return dst, nil
}
