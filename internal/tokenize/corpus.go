package tokenize

import (
	"math/rand/v2"
	"strings"
)

// The built-in corpus: the texts on which a tokenizer is tried when it is loaded. Two encoders that agree on it, or a chunked
// and a whole encoding that agree on it, are taken to agree everywhere; so it leans on what encoders differ in: borders
// between kinds of characters, runs of white space, line ends, characters that compose, special tokens in text.

// corpusTexts are written by hand.
var corpusTexts = [...]string{
	"",
	" ",
	"a",
	"\n",
	"Hello, world! It's a test, isn't it? We'll see what they've done; I'd say they're right. IT'S LOUD, DON'T YOU THINK?",
	"The quick brown fox jumps over the lazy dog. Then it sleeps, dreams, and wakes.\n\nA new paragraph begins here.\nAnd a line.\n\n\nThree line ends before.",
	"func main() {\n\tfor i := 0; i < 10; i++ {\n\t\tfmt.Printf(\"%d\\n\", i*i) // square\n\t}\n}\n",
	"def f(x: int) -> str:\n    \"\"\"Doc.\"\"\"\n    return f\"{x:>10}\" if x % 2 == 0 else 'odd'\n\n\nclass A(B):\n    pass\n",
	"{\"a\": [1, 2.5, -3e10, null, true], \"b\": {\"c\": \"d\\u00e9\\n\"}, \"list\": [\"x\", \"y\"]}",
	"<div class=\"a\"><p>Text &amp; more</p><br/></div>\r\n<!-- comment -->\r\n",
	"SELECT * FROM t WHERE a <> b AND c >= 10 -- note\n/* block */ x += y || z && !w;",
	"0 1 12 123 1234 12345 123456 1234567890 3.14159 1,000,000 0xDEADBEEF 1e-10 2024-03-18T09:41:07Z 10.0.0.1:8000",
	"spaces:  two   three    four     five      \t tab \t\t tabs\n  indented\n\t\n \n  \n   end   ",
	"trailing \n spaces \n\n and\r\nwindows\r\n\r\nlines\rold mac\x0bvt\x0cff",
	"Zero\u200bwidth, no\u00a0break, ideographic\u3000space, line\u2028separator, bom\ufeff, soft\u00adhyphen",
	"e\u0301 é e\u0300\u0323 \u1e0b\u0323 Å Å ﬁ ligature ① ½ ㎏ \u0344 가 각 한글 각\u11a8",
	"Грамматика русского языка. Поезд, который ушёл, не вернётся.\nНовая строка, и ещё одна.",
	"Καλημέρα κόσμε, πώς είσαι; Τὸ τραῖνο φεύγει.\nΝέα γραμμή.",
	"你好，世界！今天天气很好。我们去公园吧，然后吃饭。\n第二行，继续。服务器收到请求以后，先查看缓存。",
	"こんにちは、世界。今日はいい天気ですね。カタカナ、ひらがな、漢字。\n二行目です。",
	"안녕하세요, 세계! 오늘은 날씨가 좋습니다.\n둘째 줄입니다.",
	"مرحبا بالعالم، كيف حالك؟ النص العربي مع تشكيلٍ.\nسطر جديد.",
	"שלום עולם, מה שלומך? טקסט עם נִקּוּד.\nשורה חדשה.",
	"नमस्ते दुनिया, आप कैसे हैं? हिन्दी में लिखा हुआ पाठ।\nनई पंक्ति।",
	"สวัสดีชาวโลก วันนี้อากาศดี ภาษาไทยไม่มีช่องว่าง",
	"😀 😃😄 👍🏽 👩‍💻 👨‍👩‍👧‍👦 🇳🇴🇯🇵 ❤️ ✅ 🚀 text🎉text 🎉, and. 🎉\n🎉A",
	"← ↑ → ↓ ⇒ ∀x∈ℝ: ∃y ≥ x² … “quotes” ‘single’ – en — em • bullet § ¶ © ® ™ € £ ¥",
	"MixedCASEWords camelCaseString snake_case_name kebab-case-name SCREAMING_SNAKE XMLHttpRequest iPhone15ProMax v1.2.3-rc1",
	"https://example.com/a/b?c=d&e=f#g user@example.com C:\\path\\to\\file.txt /usr/local/bin:~/.config $HOME %PATH% @mention #tag",
	"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
	"................ ,,,,,,,, !!!!!!!! -------- ======== ######## ________ //////// ''''''' \"\"\"\" ~~~~ ^^^^",
	"word,word.word;word:word!word?word (paren) [bracket] {brace} <angle> 'single' \"double\" `tick` a, b. c; d: e! f? g",
	"Null\x00byte, bell\x07, escape\x1b[31mred\x1b[0m, delete\x7f, replacement\ufffd, private\ue000, astral\U0001d54f\U00020000",
	"Antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis Donaudampfschifffahrtsgesellschaftskapitän",
	"[INST] <<SYS>> You are. <</SYS>> Hi [/INST] <s> </s> <unk> <|endoftext|> <|im_start|>user\nHi<|im_end|> <bos><eos> [CLS] [SEP] [MASK] ▁under▁score",
}

// fuzzAlphabet is what the fuzzed texts are made of: pieces that meet in ways which people's texts seldom show.
var fuzzAlphabet = [...]string{
	"a", "b", "Z", "e", "the", "ing", "Word", "HTTP", "s", "t", "'s", "'t", "'ll", "'RE", "é", "ß", "ñ", "и", "ы", "Я", "λ", "م", "ش", "א", "न", "ि", "ก",
	"你", "好", "的", "日", "の", "カ", "ー", "한", "글", "，", "。", "、", "？", "・", " ", " ", " ", " ", "  ", "   ", "\n", "\n", "\n", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u200b", "\u2028",
	",", ".", ", ", ". ", ",", ".", "!", "?", ";", ":", "-", "--", "_", "(", ")", "[", "]", "{", "}", "<", ">", "/", "\\", "\"", "'", "`", "#", "$", "%", "&", "*", "+", "=", "|", "~", "^", "@", "…", "—", "“", "”",
	"0", "1", "7", "12", "345", "6789", "\u0301", "\u0308", "\u0323", "\u200d", "\ufe0f", "😀", "👍🏽", "👩‍💻", "🇳", "\x00", "\x7f", "▁", "Ġ", "Ċ", "½", "²", "Ⅳ", "ﬁ", "ǅ", "ͅ",
}

// corpus returns the built-in texts, the same in every process: those by hand, each special token between words, and n
// fuzzed texts from a fixed seed.
func corpus(special []string, n int) []string {
	texts := append([]string(nil), corpusTexts[:]...)
	const maxSpecial = 64
	var all strings.Builder
	for i, token := range special {
		if i == maxSpecial {
			break
		}
		texts = append(texts, "word "+token+" word, "+token+token+"\n"+token+"Word. "+strings.ToUpper(token)+token[:len(token)-1])
		all.WriteString(token)
		all.WriteString(corpusTexts[i%len(corpusTexts)])
	}
	texts = append(texts, all.String())
	rng := rand.New(rand.NewPCG(20240318, 1)) //nolint:gosec // a fixed seed is the point
	for range n {
		texts = append(texts, fuzzText(rng, special, 4+rng.IntN(60)))
	}
	return texts
}

// fuzzText joins n random pieces, now and then a special token.
func fuzzText(rng *rand.Rand, special []string, n int) string {
	var b strings.Builder
	for range n {
		switch {
		case len(special) > 0 && rng.IntN(40) == 0:
			b.WriteString(special[rng.IntN(len(special))])
		case rng.IntN(12) == 0: // A piece repeated: runs are where greedy rules differ.
			piece := fuzzAlphabet[rng.IntN(len(fuzzAlphabet))]
			for range 2 + rng.IntN(5) {
				b.WriteString(piece)
			}
		default:
			b.WriteString(fuzzAlphabet[rng.IntN(len(fuzzAlphabet))])
		}
	}
	return b.String()
}
